"""From a grant to a push: weights, the gradient or the task's steps, the sample guard, filter and compression."""
