"""What a gradient does to weights: the optimizers, for the server and for workers that step themselves."""
