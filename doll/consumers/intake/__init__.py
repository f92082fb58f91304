"""From Kafka to decoded batches: fetching, cutting, decoding, dead letters."""
