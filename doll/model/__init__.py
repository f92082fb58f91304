"""A task's model as one flat vector, its construction without memory for tables, and its initial weights."""
