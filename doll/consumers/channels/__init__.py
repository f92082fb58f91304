"""The transports of a worker's records: Kafka, and a control link if there is one."""
