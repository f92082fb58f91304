"""How the server's records travel: through Kafka, and over control links where there are any."""
