"""A task's model as one flat vector, and without memory for its tables."""
