"""The reads, times and bytes of a job's consistency policy, from the parameter server's measures. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Self

import msgspec

from doll.amounts import byte_size, known, number
from doll.records.control import Measures
from doll.theory.staleness import Histogram


class Staleness(msgspec.Struct, frozen=True):
    """Reads by the difference of `doll.theory.staleness`: -1 is that of bsp, less is staler.

    Attributes:
        mean: None without reads.
        p99: 99 % of the reads are not staler than this; None without reads.
        reads: differences counted in `histogram`.
        older_reads: reads of versions too old to be compared.
    """

    mean: float | None
    p99: float | None
    reads: int
    older_reads: int
    histogram: dict[int, int]


class BytesSent(msgspec.Struct, frozen=True):
    """Gradients and rows of tables as sent, and before coding; versions of the weights that workers have read."""

    gradients: int
    gradients_dense: int
    weights: int
    rows: int = 0
    rows_plain: int = 0
    row_requests: int = 0  # ids that workers have asked for

    @property
    def pushed(self) -> int:
        """Bytes from workers: contributions, of tables as well, and requests for rows."""
        return self.gradients + self.row_requests

    @property
    def fetched(self) -> int:
        """Bytes to workers: weights, and rows of tables."""
        return self.weights + self.rows


class PolicySummary(msgspec.Struct, frozen=True):
    """The sums over all reads, pushes and updates so far.

    Attributes:
        blocked_s: time for which workers held a complete batch, were idle and had no grant, added up over the workers.
        computing_s: time for which they read weights, computed and stored gradients.
        idle_s: the rest of their time, between two pushes of a process: blocked, or without a batch.
        void_batches: computed again, since their weights missed more than the policy allows.
    """

    staleness: Staleness
    blocked_s: float
    computing_s: float
    idle_s: float
    bytes: BytesSent
    void_batches: int = 0

    @classmethod
    def total(cls, measures: Iterable[Measures]) -> Self | None:
        """The sum of several servers' measures, one for each term; None without measures."""
        histogram, parts = Histogram(), list(measures)
        if not parts:
            return None
        for part in parts:
            histogram.merge(Histogram(part.staleness, total=part.staleness_total, older=part.older_reads))
        mean, p99 = (histogram.mean, histogram.percentile(1)) if histogram.size else (None, None)
        return cls(
            Staleness(mean, p99, histogram.size, histogram.older, dict(sorted(histogram.counts.items()))),
            blocked_s=math.fsum(part.blocked_s for part in parts),
            computing_s=math.fsum(part.computing_s for part in parts),
            idle_s=math.fsum(part.idle_s for part in parts),
            bytes=BytesSent(
                gradients=sum(part.gradient_bytes for part in parts),
                gradients_dense=sum(part.dense_gradient_bytes for part in parts),
                weights=sum(part.weights_bytes for part in parts),
                rows=sum(part.row_bytes for part in parts),
                rows_plain=sum(part.plain_row_bytes for part in parts),
                row_requests=sum(part.row_request_bytes for part in parts),
            ),
            void_batches=sum(part.void_batches for part in parts),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `report.json`; `msgspec.convert` with `strict=False` reads them."""
        plain: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        pushed, fetched = self.bytes.pushed, self.bytes.fetched
        plain["bytes"] |= {"pushed": pushed, "fetched": fetched, "both_ways": pushed + fetched}
        return {**plain, "blocked_share": self.blocked_share}

    @property
    def blocked_share(self) -> float:
        """Share of the workers' time for which they were blocked; NaN before any push."""
        total_s = self.idle_s + self.computing_s
        return self.blocked_s / total_s if total_s > 0 else math.nan

    @property
    def staleness_text(self) -> str:
        """Mean, and the staleness that 99 % of the reads do not exceed."""
        mean, p99 = self.staleness.mean, self.staleness.p99
        return "?" if mean is None or p99 is None else f"{number(mean)} (p99 {number(p99)})"

    @property
    def blocked_text(self) -> str:
        share = self.blocked_share
        return f"{100 * share:.0f} %" if known(share) else "?"

    @property
    def void_text(self) -> str:
        """The void batches, to follow the blocked time; "" if there are none, as under most policies."""
        return f", {self.void_batches:,} batches void" if self.void_batches else ""

    @property
    def bytes_text(self) -> str:
        """Gradients as sent, and before coding if that is more."""
        sent = byte_size(self.bytes.gradients)
        if self.bytes.gradients_dense <= self.bytes.gradients:
            return sent
        return f"{sent} of {byte_size(self.bytes.gradients_dense)}"

    @property
    def weights_text(self) -> str:
        """Weights that workers have read, and rows of tables that they were sent."""
        weights = byte_size(self.bytes.weights)
        return f"{weights} and rows {byte_size(self.bytes.rows)}" if self.bytes.rows else weights

    def text(self) -> str:
        """The summary in one line."""
        return (
            f"staleness {self.staleness_text}, workers blocked {self.blocked_text} of the time{self.void_text}, "
            f"gradients {self.bytes_text}, weights {self.weights_text}"
        )
