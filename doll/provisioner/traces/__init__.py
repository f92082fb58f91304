"""Recorded markets: prices and availability of spot over time, and the market that replays them.

Formats of public data sets are in `doll_lab.traces`.
"""
