"""Prices: the port, and one adapter per source of prices.

To add a price feed: write a module here with a class that implements `doll.provisioner.prices.port.PriceFeed`, and use
it in the `Machines` that a fleet's opener in `doll.provisioner.machines` returns.
"""
