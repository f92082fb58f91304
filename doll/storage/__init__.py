"""Where tensors and checkpoints are kept: the ports, and one adapter per vendor."""
