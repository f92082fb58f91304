"""The way from a grant to a push: weights, the gradient or the task's steps, sample guard, filter and compression."""
