"""Processes on this machine: Kafka, Redis and the job's roles, all of which end with their parent."""
