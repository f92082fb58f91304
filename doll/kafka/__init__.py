"""Kafka: the only package that imports its client library: clients, topics, readers, publishers."""
