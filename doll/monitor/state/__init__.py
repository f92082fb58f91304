"""Modules that compute the state of a job from its records, one subject for each module."""
