"""Prices: the port, and one adapter per source of prices."""
