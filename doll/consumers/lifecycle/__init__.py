"""Start and end of a worker: its slot, notices of an interruption, an orderly departure, a loop that stands still."""
