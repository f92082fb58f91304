"""Kafka: the one package that builds clients: topics, readers, senders."""
