"""Everything on one machine: a Kafka broker, a Redis server and the job's processes; none outlives its parent."""
