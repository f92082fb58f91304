"""The steps from Kafka to decoded batches: fetching, cutting, decoding, dead letters."""
