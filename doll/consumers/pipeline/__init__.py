"""A worker that is a pipeline: its stages, which are separate processes, compute the gradients."""
