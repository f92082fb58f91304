"""The steps from a grant to a push: weights, gradient or the task's steps, sample guard, filter and compression."""
