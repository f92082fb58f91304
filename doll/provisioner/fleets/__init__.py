"""Fleets: the port, and one adapter per owner of machines."""
