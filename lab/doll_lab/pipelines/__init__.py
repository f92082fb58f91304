"""Pipelines of a fleet (HetPipe): which devices form a virtual worker, schedules, predictions and pictures."""
