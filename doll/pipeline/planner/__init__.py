"""Planning of stages, their layers and their devices: partition, schedule, allocation of a fleet, predictions."""
