"""The steps from a grant to a push: load weights, compute the gradient or the task's step, guard, filter, compress."""
