"""Recorded markets: prices and availability of spot over time, and the market that replays them."""
