"""Producers: put samples of a source on the job's `samples` topic, each at its arrival time."""
