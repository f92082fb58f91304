"""Clients, topics, readers and publishers of Kafka. Only this package imports Kafka's client library."""
