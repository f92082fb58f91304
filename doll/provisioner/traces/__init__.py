"""Recorded markets: prices and availability of spot over time, and the market that replays them.

To add a format of recordings, see `doll.provisioner.traces.formats`.
"""
