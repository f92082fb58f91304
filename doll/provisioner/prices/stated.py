"""The price port with two prices that never change: for machines without a market."""

from __future__ import annotations

from doll.provisioner.planning.state import Market
from doll.provisioner.prices.port import PriceFeed
from doll.provisioner.traces.model import Series, constant
from doll.theory.cost import Prices


class StatedPrices:
    """`PriceFeed` of one spot and one on-demand price, USD per hour.

    Raises:
        ValueError: a price out of its range.
    """

    def __init__(self, spot_usd_per_h: float, on_demand_usd_per_h: float) -> None:
        self._prices = Prices(spot_usd_per_h, on_demand_usd_per_h)

    def current(self, now_s: float) -> Prices:
        return self._prices

    def series(self, pool: str, market: Market, start_s: float, end_s: float) -> Series:
        prices = self._prices
        return constant(prices.spot_usd_per_h if market == "spot" else prices.on_demand_usd_per_h, start_s, end_s)


_prices: type[PriceFeed] = StatedPrices
