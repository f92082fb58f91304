"""Embedding tables: the layers whose weights they are, rows, and where a row is found."""
