"""Pipelines of a fleet (HetPipe): the devices of each virtual worker, schedules, predictions and figures."""
