"""Machines, prices and costs over time, from the decisions of a provisioner. Bounded memory; pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from doll.monitor.state.thinned import Thinned

MAX_SPANS: Final = 100  # limit for each slot, and for all slots together:
MAX_SPANS_IN_ALL: Final = 10_000
MAX_POINTS: Final = 480


@dataclass
class MarketSpan:
    """A period in which a slot's worker ran on one market; seconds on the job's clock.

    Attributes:
        end_s: end of the period; None while the worker runs.
    """

    begin_s: float
    market: str
    end_s: float | None = None


class MarketPoint(NamedTuple):
    """One decision; unknown values are NaN."""

    at_s: float
    spent_usd: float
    all_on_demand_usd: float
    spot_usd_per_h: float
    on_demand_usd_per_h: float


class MarketHistory:
    """The machines of each slot over time, and their cost."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.spans: list[deque[MarketSpan]] = []
        self._points = Thinned[MarketPoint](MAX_POINTS)
        self._newest_s = -math.inf

    @property
    def points(self) -> dict[int, MarketPoint]:
        """The decisions by their number, thinned out."""
        return self._points.points

    def feed(self, decision: Mapping[str, Any]) -> None:
        """Process the next decision, or the same decision from another source.

        The journal contains the market on which each worker runs; the topic contains only the wanted market.
        """
        at_s = float(decision.get("elapsed_s", math.nan))
        if math.isnan(at_s):
            return
        if at_s < self._newest_s:  # the job has begun again
            self._begin()
        numbers = (float(decision.get(name, math.nan)) for name in MarketPoint._fields[1:])
        point = MarketPoint(at_s, *numbers)
        if at_s > self._newest_s:
            self._newest_s = at_s
            self._points.add(point)
        else:
            self._points.replace(point)
        running = decision.get("running", decision["markets"])
        while len(self.spans) < len(running):
            self.spans.append(deque(maxlen=max(4, min(MAX_SPANS, MAX_SPANS_IN_ALL // len(running)))))
        for slot, market in enumerate(running):
            self._note(slot, market, at_s)

    def _note(self, slot: int, market: str, at_s: float) -> None:
        spans = self.spans[slot]
        last = spans[-1] if spans and spans[-1].end_s is None else None
        if last is not None and last.market == market:
            return
        if last is not None:
            last.end_s = at_s
            if last.begin_s == at_s:
                spans.pop()
        if market:
            spans.append(MarketSpan(at_s, market))
