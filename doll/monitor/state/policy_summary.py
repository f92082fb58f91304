"""The effects of a job's consistency policy (staleness, times, bytes), measured by the parameter server. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Self

import msgspec

from doll.amounts import byte_size, known, number
from doll.records.control import Measures
from doll.theory.staleness import Histogram


class Staleness(msgspec.Struct, frozen=True):
    """Numbers of reads by the difference that `doll.theory.staleness` defines. The difference is -1 under bsp; a
    smaller number means staler weights.

    Attributes:
        mean: mean difference; None without reads.
        p99: 99 % of the reads are not staler than this difference; None without reads.
        older_reads: number of differences that are not in it, because the version that was read is too old.
    """

    mean: float | None
    p99: float | None
    reads: int
    older_reads: int
    histogram: dict[int, int]

    @property
    def counted_share(self) -> float:
        """The share of all differences that are in `histogram`; NaN without reads."""
        return Histogram(self.histogram, older=self.older_reads).counted_share


class BytesSent(msgspec.Struct, frozen=True):
    """Bytes of gradients and table rows (as sent, and before coding), and bytes of weights that workers have read."""

    gradients: int
    gradients_dense: int
    weights: int
    rows: int = 0
    rows_plain: int = 0
    row_requests: int = 0  # ids of rows that workers have requested

    @property
    def pushed(self) -> int:
        """The bytes from workers: gradients, also of tables, and requests for rows."""
        return self.gradients + self.row_requests

    @property
    def fetched(self) -> int:
        """The bytes to workers: weights, and rows of tables."""
        return self.weights + self.rows


class PolicySummary(msgspec.Struct, frozen=True):
    """The sums over all reads, pushes and updates so far.

    Attributes:
        blocked_s: time in which workers had a complete batch, were idle and had no grant, summed over the workers.
        computing_s: time in which workers read weights, and computed and stored gradients.
        idle_s: the remaining time between two pushes of a process: blocked, or without a batch.
        void_batches: batches that were computed again, because their weights were staler than the policy allows.
    """

    staleness: Staleness
    blocked_s: float
    computing_s: float
    idle_s: float
    bytes: BytesSent
    void_batches: int = 0

    @classmethod
    def total(cls, measures: Iterable[Measures]) -> Self | None:
        """Return the sum of the measurements of several servers, one for each term; None if there are none."""
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
        """Return plain values for `report.json`; `msgspec.convert` with `strict=False` reads them."""
        plain: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        pushed, fetched = self.bytes.pushed, self.bytes.fetched
        plain["staleness"]["counted_share"] = self.staleness.counted_share
        plain["bytes"] |= {"pushed": pushed, "fetched": fetched, "both_ways": pushed + fetched}
        return {**plain, "blocked_share": self.blocked_share}

    @property
    def blocked_share(self) -> float:
        """The share of the workers' time in which they were blocked; NaN before the first push."""
        total_s = self.idle_s + self.computing_s
        return self.blocked_s / total_s if total_s > 0 else math.nan

    @property
    def staleness_text(self) -> str:
        """The mean staleness, the staleness that 99 % of the reads do not exceed, and the share that is counted."""
        mean, p99 = self.staleness.mean, self.staleness.p99
        return "?" if mean is None or p99 is None else f"{number(mean)} (p99 {number(p99)}, {self.counted_text})"

    @property
    def counted_text(self) -> str:
        """The share of the reads that staleness counts, rounded down: 100 % means all."""
        share = self.staleness.counted_share
        return f"{math.floor(1000 * share) / 10:g} % of reads" if known(share) else "?"

    @property
    def blocked_text(self) -> str:
        share = self.blocked_share
        return f"{100 * share:.0f} %" if known(share) else "?"

    @property
    def void_text(self) -> str:
        """The void batches, as a suffix of the blocked time; "" if there are none. Most policies never have any."""
        return f", {self.void_batches:,} batches void" if self.void_batches else ""

    @property
    def blocked_and_void_text(self) -> str:
        return self.blocked_text + self.void_text

    @property
    def bytes_text(self) -> str:
        """The bytes of gradients as sent, and also the bytes before coding if these are more."""
        sent = byte_size(self.bytes.gradients)
        if self.bytes.gradients_dense <= self.bytes.gradients:
            return sent
        return f"{sent} of {byte_size(self.bytes.gradients_dense)}"

    @property
    def weights_text(self) -> str:
        """The bytes of weights that workers have read, and of table rows sent to them."""
        weights = byte_size(self.bytes.weights)
        return f"{weights} and rows {byte_size(self.bytes.rows)}" if self.bytes.rows else weights

    def text(self) -> str:
        """Return the summary in one line."""
        return (
            f"staleness {self.staleness_text}, workers blocked {self.blocked_text} of the time{self.void_text}, "
            f"gradients {self.bytes_text}, weights {self.weights_text}"
        )
