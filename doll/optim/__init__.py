"""The optimizers of the server, and of workers that make steps themselves."""
