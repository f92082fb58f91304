"""The stores of tensors and checkpoints: the ports (interfaces), and one adapter for each vendor."""
