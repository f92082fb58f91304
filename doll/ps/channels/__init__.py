"""The transport of the server's records: through Kafka, and over control links if there are any."""
