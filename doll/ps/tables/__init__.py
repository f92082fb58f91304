"""Tables at the parameter server: rows, the optimizer state of those that were touched, and what has changed."""
