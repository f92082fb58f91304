"""Actors of a Ray cluster as instances."""
