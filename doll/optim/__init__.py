"""The optimizers, for the server and for workers that step themselves."""
