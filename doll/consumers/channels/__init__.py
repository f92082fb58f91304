"""How a worker's records travel: through Kafka, and over a control link where there is one."""
