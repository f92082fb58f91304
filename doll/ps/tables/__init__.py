"""Tables at the parameter server: rows, the optimizer state of touched rows, and the tracking of changes."""
