"""What a decision does to the model: the weights, their updater, and where both are kept."""
