"""Fleets: the port, and one adapter for each kind of machine. CONTRIBUTING.md describes how to add one."""
