"""Processes on this machine: Kafka, Redis and the job's roles. All of them end when their parent ends."""
