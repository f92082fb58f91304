"""Pipelines inside a virtual worker (HetPipe): a model is cut into stages, each in its own process."""
