"""Recorded markets: prices and availability of spot over time, and the market that replays them.

`doll_lab.traces` reads the formats of public data sets.
"""
