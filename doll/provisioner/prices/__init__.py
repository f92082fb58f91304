"""Prices: the port, and one adapter per source of prices.

A new feed implements `doll.provisioner.prices.port.PriceFeed`; a fleet's opener in `doll.provisioner.machines` uses it.
"""
