"""What a job's consistency policy gave and cost, from the parameter server's measures. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from doll.monitor.state.formats import byte_size, known, number
from doll.records.control import Measures
from doll.theory.staleness import Histogram


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """Of all reads, pushes and updates so far; NaN where there were none.

    Attributes:
        reads: differences counted in `histogram`.
        older_reads: reads of versions too old to be compared.
        staleness_mean: mean of `doll.theory.staleness`'s difference: -1 is that of bsp, less is staler.
        staleness_p99: 99 % of the reads are not staler than this.
        histogram: reads by difference.
        blocked_s: time for which workers held a complete batch, were idle and had no grant, added up over the workers.
        computing_s: time for which they read weights, computed and stored gradients.
        idle_s: the rest of their time, between two pushes of a process: blocked, or without a batch.
        gradient_bytes: gradients as sent.
        dense_gradient_bytes: the same gradients before coding.
        weights_bytes: versions read by workers.
        row_bytes, plain_row_bytes: rows of tables sent to workers, as sent and before coding.
    """

    reads: int
    older_reads: int
    staleness_mean: float
    staleness_p99: float
    histogram: dict[int, int]
    blocked_s: float
    computing_s: float
    idle_s: float
    gradient_bytes: int
    dense_gradient_bytes: int
    weights_bytes: int
    row_bytes: int = 0
    plain_row_bytes: int = 0

    @classmethod
    def of(cls, measures: Iterable[Measures]) -> Self | None:
        """The sum of several servers' measures, one for each term; None without measures."""
        histogram, parts = Histogram(), list(measures)
        if not parts:
            return None
        for part in parts:
            histogram.merge(Histogram(part.staleness, total=part.staleness_total, older=part.older_reads))
        return cls(
            reads=histogram.size, older_reads=histogram.older, staleness_mean=histogram.mean,
            staleness_p99=histogram.percentile(1), histogram=dict(sorted(histogram.counts.items())),
            blocked_s=math.fsum(part.blocked_s for part in parts),
            computing_s=math.fsum(part.computing_s for part in parts),
            idle_s=math.fsum(part.idle_s for part in parts),
            gradient_bytes=sum(part.gradient_bytes for part in parts),
            dense_gradient_bytes=sum(part.dense_gradient_bytes for part in parts),
            weights_bytes=sum(part.weights_bytes for part in parts),
            row_bytes=sum(part.row_bytes for part in parts),
            plain_row_bytes=sum(part.plain_row_bytes for part in parts),
        )  # fmt: skip

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The summary that `to_dict` wrote, after a way through JSON.

        Raises:
            KeyError, TypeError, ValueError: it is not of this form.
        """
        staleness, size = content["staleness"], content["bytes"]
        mean, p99 = (math.nan if value is None else float(value) for value in (staleness["mean"], staleness["p99"]))
        return cls(
            reads=int(staleness["reads"]), older_reads=int(staleness["older_reads"]), staleness_mean=mean,
            staleness_p99=p99, histogram={int(key): int(value) for key, value in staleness["histogram"].items()},
            blocked_s=float(content["blocked_s"]), computing_s=float(content["computing_s"]),
            idle_s=float(content["idle_s"]),
            gradient_bytes=int(size["gradients"]), dense_gradient_bytes=int(size["gradients_dense"]),
            weights_bytes=int(size["weights"]),
            row_bytes=int(size.get("rows", 0)), plain_row_bytes=int(size.get("rows_plain", 0)),
        )  # fmt: skip

    @property
    def blocked_share(self) -> float:
        """Share of the workers' time for which they were blocked; NaN before any push."""
        total_s = self.idle_s + self.computing_s
        return self.blocked_s / total_s if total_s > 0 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """For `report.json`."""
        return {
            "staleness": {
                "mean": self.staleness_mean,
                "p99": self.staleness_p99,
                "reads": self.reads,
                "older_reads": self.older_reads,
                "histogram": {str(key): value for key, value in self.histogram.items()},
            },
            "blocked_s": self.blocked_s,
            "blocked_share": self.blocked_share,
            "computing_s": self.computing_s,
            "idle_s": self.idle_s,
            "bytes": {
                "gradients": self.gradient_bytes,
                "gradients_dense": self.dense_gradient_bytes,
                "weights": self.weights_bytes,
                "rows": self.row_bytes,
                "rows_plain": self.plain_row_bytes,
            },
        }

    @property
    def staleness_text(self) -> str:
        """Mean, and the staleness that 99 % of the reads do not exceed."""
        if not known(self.staleness_mean):
            return "?"
        return f"{number(self.staleness_mean)} (p99 {number(self.staleness_p99)})"

    @property
    def blocked_text(self) -> str:
        share = self.blocked_share
        return f"{100 * share:.0f} %" if known(share) else "?"

    @property
    def bytes_text(self) -> str:
        """Gradients as sent, and before coding where that is more."""
        sent = byte_size(self.gradient_bytes)
        if self.dense_gradient_bytes <= self.gradient_bytes:
            return sent
        return f"{sent} of {byte_size(self.dense_gradient_bytes)}"

    @property
    def weights_text(self) -> str:
        """Weights that workers have read, and rows of tables that they were sent."""
        if not self.row_bytes:
            return byte_size(self.weights_bytes)
        return f"{byte_size(self.weights_bytes)} and rows {byte_size(self.row_bytes)}"

    def text(self) -> str:
        """In one line."""
        return (
            f"staleness {self.staleness_text}, workers blocked {self.blocked_text} of the time, gradients "
            f"{self.bytes_text}, weights {self.weights_text}"
        )
