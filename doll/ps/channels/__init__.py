"""How the server's records travel: through Kafka, and over control links if there are any."""
