"""Which layers each stage gets, and on which device: partition, schedule, allocation of a fleet, predictions."""
