"""Embedding tables: the layers that use them, rows, and the index of rows by id."""
