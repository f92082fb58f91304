"""Folds of a job's records, one subject per module."""
