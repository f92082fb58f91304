"""`PriceFeed` over a replayed market (`doll.provisioner.traces.market`), per hour of the wall clock."""

from __future__ import annotations

import itertools

import numpy as np

from doll.provisioner.planning.state import Market
from doll.provisioner.traces.market import MarketClock, SpotMarket
from doll.provisioner.traces.model import Series
from doll.theory.cost import Prices


class TracePrices:
    """Prices in USD per wall hour, the market's times its speed-up; before the market opens nothing is billed."""

    def __init__(self, market: SpotMarket, clock: MarketClock) -> None:
        self._market = market
        self._clock = clock

    def current(self, now_s: float) -> Prices:
        return self._market.prices(self._clock.since(now_s))

    def series(self, pool: str, market: Market, start_s: float, end_s: float) -> Series:
        """The same for every pool: a replayed market has one price."""
        opened_s = self._clock.opened_s
        if opened_s is None or end_s <= opened_s:
            return Series(np.array([start_s, end_s]), np.zeros(2))
        begin_s = max(start_s, opened_s)
        changes = [] if market == "on_demand" else self._market.spot_changes_s(begin_s - opened_s, end_s - opened_s)
        times = [begin_s, *(opened_s + change_s for change_s in changes), end_s]
        # In the middle of each piece: at its very edge, rounding could show the price before.
        values = [self._price(market, (one + two) / 2 - opened_s) for one, two in itertools.pairwise(times)]
        values.append(values[-1])
        if start_s < opened_s:
            times, values = [start_s, *times], [0.0, *values]
        return Series(np.array(times), np.array(values))

    def _price(self, market: Market, at_s: float) -> float:
        if market == "on_demand":
            return self._market.on_demand_usd_per_h
        return self._market.spot_usd_per_h(at_s)
