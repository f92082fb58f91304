"""The price port: what machines cost, now and so far. Adapters: stated prices, a trace, and EC2."""

from __future__ import annotations

from typing import Protocol

from doll.provisioner.planning.state import Market
from doll.provisioner.traces.model import Series
from doll.theory.cost import Prices


class PriceFeed(Protocol):
    """Prices of one machine, also where a worker has several. All times are Unix seconds."""

    def current(self, now_s: float) -> Prices:
        """Cheapest usable spot pool and cheapest on-demand one, USD per hour.

        Raises:
            ServiceUnavailableError: no price is known and none is available.
        """
        ...

    def series(self, pool: str, market: Market, start_s: float, end_s: float) -> Series:
        """The pool's price over this time, as far as it is known; the bill of an instance is its mean times the hours.

        Raises:
            ServiceUnavailableError: no price is known and none is available.
        """
        ...
