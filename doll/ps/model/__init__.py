"""The model at the server: the weights, their updater, and where both are kept."""
