"""Prices: the port, and one adapter for each source of prices.

A new price feed implements `doll.provisioner.prices.port.PriceFeed`. The opener of a fleet in
`doll.provisioner.machines` uses it.
"""
