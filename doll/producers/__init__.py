"""Producers: they send the samples of a source to the job's `samples` topic, each at its arrival time."""
