"""The progress of a job's join, computed from the metrics of its joiners. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from doll.process.metric_names import JOINED_TOTALS, LEFT, OPEN_KEYS, joiner_of
from doll.records.control import Metric

_RATE_S: Final = 10.0  # a joiner sends its metrics each second


@dataclass(frozen=True, slots=True)
class JoinCounts:
    """The state of a join. Samples and the other totals are those that the metrics of its joiners contain.

    Attributes:
        joiners: number of joiners that have sent metrics in the last seconds.
        samples_per_s: samples that they write, without corrections.
        dropped: features whose window closed without a label, if these are dropped.
        refused: records that are in no sample.
    """

    joiners: int = 0
    samples_per_s: float = 0.0
    samples: int = 0
    corrections: int = 0
    dropped: int = 0
    refused: int = 0
    open_keys: int = 0

    def text(self) -> str:
        """Return the state in one line."""
        if not (self.joiners or self.samples or self.refused or self.dropped):
            return "join: no joiner has reported yet (doll join)"
        many = f"{self.joiners} joiner{'s' * (self.joiners != 1)}"
        return f"join: {self.samples_per_s:,.0f} samples/s from {many}; {self.totals_text()}"

    def totals_text(self) -> str:
        counts = {
            "samples": self.samples, "corrections": self.corrections, "dropped": self.dropped, "refused": self.refused,
            "open keys": self.open_keys,
        }  # fmt: skip
        return ", ".join(f"{count:,} {name}" for name, count in counts.items())


@dataclass(slots=True)
class _Joiner:
    """The newest metrics of a joiner, and its totals before it joined its group again."""

    values: Mapping[str, float] = field(default_factory=dict)
    earlier: Counter[str] = field(default_factory=Counter)
    seen: deque[tuple[float, float]] = field(default_factory=deque)  # time and samples, for the rate

    def feed(self, record: Metric) -> None:
        if record.values.get(LEFT):
            self.earlier.update({name: round(self.values.get(name, 0)) for name in JOINED_TOTALS})
            self.values = {}
            self.seen.clear()
            return
        if any(record.values.get(name, 0) < self.values.get(name, 0) for name in JOINED_TOTALS):
            self.earlier.update({name: round(self.values[name]) for name in JOINED_TOTALS})
        self.values = {name: record.values.get(name, 0.0) for name in (*JOINED_TOTALS, OPEN_KEYS)}
        self.seen.append((record.time_s, self.total("samples_total")))
        while len(self.seen) > 2 and self.seen[0][0] < record.time_s - _RATE_S:
            self.seen.popleft()

    def total(self, name: str) -> int:
        return self.earlier[name] + round(self.values.get(name, 0))

    def per_s(self) -> float:
        (since_s, before), (until_s, after) = self.seen[0], self.seen[-1]
        return (after - before) / (until_s - since_s) if until_s > since_s else 0.0


class JoinProgress:
    """The progress of a join, from the `Metric` records of its joiners."""

    def __init__(self) -> None:
        self._joiners: dict[int, _Joiner] = {}

    def feed(self, record: Metric) -> None:
        """Process the record of a joiner; other records are ignored."""
        if (number := joiner_of(record.source)) is not None and record.values:
            self._joiners.setdefault(number, _Joiner()).feed(record)

    def counts(self, now_s: float = 0.0) -> JoinCounts:
        """Return the state at Unix `now_s`, or at the newest metrics of a joiner if they are later."""
        now_s = max([now_s, *(joiner.seen[-1][0] for joiner in self._joiners.values() if joiner.seen)])
        live = [item for item in self._joiners.values() if item.seen and item.seen[-1][0] >= now_s - _RATE_S]
        samples, corrections, dropped, refused = (
            sum(joiner.total(name) for joiner in self._joiners.values()) for name in JOINED_TOTALS
        )
        open_keys = round(sum(joiner.values[OPEN_KEYS] for joiner in live))
        per_s = sum(joiner.per_s() for joiner in live)
        return JoinCounts(len(live), per_s, samples, corrections, dropped, refused, open_keys)
