"""The model at the server: the weights, their updater, and their publication."""
