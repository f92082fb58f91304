"""Embedding tables at a worker: a cache of requested rows, and the worker's own steps on these rows."""
