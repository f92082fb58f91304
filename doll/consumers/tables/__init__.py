"""A worker's part of embedding tables: a cache of requested rows, and the worker's own steps on these rows."""
