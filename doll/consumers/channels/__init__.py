"""How a worker's records travel: through Kafka, and over a control link if there is one."""
