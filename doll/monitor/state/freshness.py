"""The freshness of a job: how long events take until they are learned, durable and served. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from doll.amounts import known, number
from doll.config.freshness import FreshnessConfig
from doll.monitor.state.served_model import quantile
from doll.records.control import ServedStatus, ServerStatus
from doll.records.event_times import BOUNDS_S, NO_LATENCIES, STAGES, LatencyCounts, Stage

_MAX_SERVERS: Final = 10_000  # processes of model servers in a run; others do not count


@dataclass(frozen=True, slots=True)
class StageFreshness:
    """The times from events until one stage. Unknown numbers are NaN.

    Attributes:
        records: number of records that have reached the stage.
        p50_s, p99_s: quantiles of their times, interpolated within the histogram's buckets.
        bad: number of those without a usable event time. They do not count as within the objective.
        limit_s, within: the job's objective, and the share of the records within it; None: there is none.
        is_met: whether this share is as large as the job wants it.
    """

    stage: Stage
    records: int
    p50_s: float
    p99_s: float
    bad: int = 0
    limit_s: float | None = None
    within: float = math.nan
    is_met: bool = True

    def text(self) -> str:
        """Return the times, such as `p50 0.8 s, p99 2.1 s; 99.2 % of 12,000 records within 5 s`."""
        parts = [f"p50 {number(self.p50_s)} s, p99 {number(self.p99_s)} s"] if known(self.p50_s) else []
        if self.limit_s is not None and known(self.within):
            missed = "" if self.is_met else " (objective missed)"
            share = math.floor(1000 * self.within) / 10
            parts.append(f"{share:g} % of {self.records:,} records within {self.limit_s:g} s{missed}")
        if self.bad:
            parts.append(f"{self.bad:,} records without a usable event time")
        return "; ".join(parts)


def freshness_text(stages: Sequence[StageFreshness]) -> str:
    """Return the freshness in one line; "" if nothing is known."""
    shown = [f"to {stage.stage} {stage.text()}" for stage in stages if known(stage.p50_s) or stage.limit_s is not None]
    return f"freshness: from events {', '.join(shown)}" if shown else ""


class FreshnessProgress:
    """The freshness over all terms of the parameter server and all processes of model servers."""

    def __init__(self, config: FreshnessConfig) -> None:
        self.config = config
        self._by_term: dict[int, ServerStatus] = {}  # only the last status of each term counts
        self._by_server: dict[str, LatencyCounts] = {}

    def feed(self, record: ServerStatus | ServedStatus) -> None:
        """Process a record of the current run."""
        if isinstance(record, ServerStatus):
            self._by_term[record.term] = record
        elif record.server in self._by_server or len(self._by_server) < _MAX_SERVERS:
            self._by_server[record.server] = record.served

    def counts(self) -> dict[Stage, LatencyCounts]:
        """Return the histogram of each stage that any record has reached."""
        totals = dict.fromkeys(STAGES, NO_LATENCIES)
        for status in self._by_term.values():
            totals["learned"] = totals["learned"].plus(status.learned or NO_LATENCIES)
            totals["durable"] = totals["durable"].plus(status.durable or NO_LATENCIES)
        for served in self._by_server.values():
            totals["served"] = totals["served"].plus(served)
        return {stage: counts for stage, counts in totals.items() if counts.records}

    def stages(self) -> tuple[StageFreshness, ...]:
        return tuple(self._stage(stage, counts) for stage, counts in self.counts().items())

    def _stage(self, stage: Stage, counts: LatencyCounts) -> StageFreshness:
        buckets = list(zip((*BOUNDS_S, math.inf), map(float, accumulate(counts.buckets)), strict=True))
        limit_s = self.config.limit_s(stage)
        within = math.nan if limit_s is None else counts.within / counts.records
        return StageFreshness(
            stage, counts.records, quantile(buckets, 0.5), quantile(buckets, 0.99), counts.bad, limit_s, within,
            limit_s is None or within >= self.config.share,
        )  # fmt: skip
