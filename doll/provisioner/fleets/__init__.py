"""Fleets: the port, and one adapter per kind of machines. CONTRIBUTING.md says how to add one."""
