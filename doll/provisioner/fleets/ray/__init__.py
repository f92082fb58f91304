"""Actors of a Ray cluster as instances.

`host` runs on the nodes, `actors` says what an actor stands for, and `fleet` is the port.
"""
