"""Pipelines inside a virtual worker (HetPipe): a model cut into stages, each in a process of its own."""
