"""Held-out evaluation of a job's published weights, in a process of its own."""
