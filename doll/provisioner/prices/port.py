"""The price port for current and past prices of machines, and its adapter for prices that a job file states.

Other adapters: a trace, and EC2.
"""

from __future__ import annotations

from typing import Protocol

from doll.provisioner.planning.state import Market
from doll.provisioner.traces.model import Series, constant
from doll.theory.cost import Prices


class PriceFeed(Protocol):
    """The prices of single machines, even if a worker has several machines. All times are Unix seconds."""

    def current(self, now_s: float) -> Prices:
        """Return the prices of the cheapest usable spot pool and of the cheapest on-demand pool, USD per hour. Raises
        ServiceUnavailableError if no price is known and none is available."""

    def series(self, pool: str, market: Market, start_s: float, end_s: float) -> Series:
        """Return the known prices of the pool in this time. The bill of an instance is the mean of this series times
        the hours. Raises the errors of `current`."""


class StatedPrices:
    """A `PriceFeed` with one spot and one on-demand price, USD per hour. Raises ValueError for an invalid price."""

    def __init__(self, spot_usd_per_h: float, on_demand_usd_per_h: float) -> None:
        self._prices = Prices(spot_usd_per_h, on_demand_usd_per_h)

    def current(self, now_s: float) -> Prices:
        return self._prices

    def series(self, pool: str, market: Market, start_s: float, end_s: float) -> Series:
        prices = self._prices
        return constant(prices.spot_usd_per_h if market == "spot" else prices.on_demand_usd_per_h, start_s, end_s)
