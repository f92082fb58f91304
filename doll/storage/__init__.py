"""The stores of tensors and checkpoints: the ports, and one adapter per vendor."""
