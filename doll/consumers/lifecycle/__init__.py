"""The start and end of a worker: its slot, interruption notices, orderly departure, detection of stalled streams."""
