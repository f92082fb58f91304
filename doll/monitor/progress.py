"""The state of a running job, folded from its records. Pure: no clock, no I/O; `doll.monitor.display` shows it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from doll.config import JobConfig, StdinSource
from doll.ledger import intervals
from doll.ledger.intervals import Span
from doll.ledger.report import Range, named
from doll.monitor.history import History
from doll.monitor.prequential import Means
from doll.monitor.rates import (
    ArrivalRateEstimator,
    Margin,
    stability_margin,
    steady_update_rate,
)
from doll.ps.stuck import STALL_REPORT_S
from doll.records import AnyRecord, Metric, TermStarted, Update

EVENTS_KEPT = 6


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as the parameter server last described it; None where it has said nothing.

    Attributes:
        machine: what it runs on, and what its market does; "" where nobody provisions machines.
        usd: what its machines have cost; NaN where nobody counts.
    """

    worker: int
    is_live: bool | None
    session: int | None
    retained_batches: int | None
    lag_records: int | None
    machine: str = ""
    usd: float = math.nan


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """Everything that a display shows at one moment. Unknown numbers are NaN or None."""

    job: str
    seconds: float
    version: int
    samples: int
    prequential: Means
    held_out_version: int | None
    held_out_loss: float
    held_out_accuracy: float
    rate_measured: float
    rate_predicted: float
    rate_stated: bool
    margin: Margin
    service_s: float
    durable_version: int | None
    waiting_batches: int | None
    workers: tuple[WorkerStatus, ...]
    sent: int | None
    send_rate_per_s: float
    eta_s: float
    ps_restarts: int
    events: tuple[tuple[float, str], ...]
    finished: str | None
    lost: tuple[Range, ...] = ()  # offsets that were deleted before they were learned
    costs: str = ""  # machines and money, where somebody provisions them


class ProgressModel:
    """Feed it records of the topics `updates` and `metrics`; ask for a `JobSnapshot`.

    Args:
        config: the job.
        started_s: monotonic seconds at the start, zero point of the times that are shown.
        after_term: terms up to this one are of earlier runs on the same topics.
    """

    def __init__(self, config: JobConfig, started_s: float, *, after_term: int = 0) -> None:
        self.config = config
        self.history = History(after_term=after_term)
        self._started_s = started_s
        self._metrics: dict[str, Mapping[str, float]] = {}
        self._arrivals = ArrivalRateEstimator(config.data.samples_per_record)
        self._stuck = False
        self._lost: dict[int, list[Span]] = {}
        self.next_offsets: dict[int, int] = {}  # per partition: one above the last offset in an update
        self._events: deque[tuple[float, str]] = deque(maxlen=EVENTS_KEPT)
        self.all_events: list[tuple[float, str]] = []

    def feed(self, record: AnyRecord) -> None:
        """Take in one record of `updates` or `metrics`; other types are ignored."""
        restarts, generation = self.history.restarts, self.history.generation
        if isinstance(record, Metric):
            of = record.values.get("term")
            if of is not None and not self.history.is_current(int(of)):
                return
            if not record.values:
                return  # a sign of life
            self._metrics[record.source] = record.values
            if record.source == "evaluator":
                self._evaluated(record)
            elif record.source == "ps":
                self._check_stuck(record.values)
            elif (lost := _lost(record)) is not None:
                self.add_lost(*lost)
        else:
            self.history.feed(record)
        if self.history.generation > generation:
            self._metrics.clear()
            self._lost.clear()
        if isinstance(record, TermStarted) and record.resumed_version == 0:
            self.next_offsets = dict(enumerate(record.origins))
        elif isinstance(record, Update):
            for member in record.members:
                self.next_offsets[member.worker] = member.hi
                for lo, hi in member.lost:
                    self.add_lost(member.worker, lo, hi)
        if self.history.restarts > restarts:
            self.add_event(f"parameter server resumed from version {self.history.version}", None)

    def add_lost(self, partition: int, lo: int, hi: int) -> None:
        """Offsets [lo, hi) of a partition were deleted before they were learned."""
        known = self._lost.get(partition, [])
        self._lost[partition] = intervals.union([*known, (lo, hi)])
        if self._lost[partition] != known:
            self.add_event(
                f"records lost: {named([Range(partition, lo, hi)])}: deleted before they were learned "
                f"(data.on_data_loss: {self.config.data.on_data_loss})",
                None,
            )

    def _check_stuck(self, values: Mapping[str, float]) -> None:
        stuck = values.get("stuck_s", 0.0) >= STALL_REPORT_S
        if stuck and not self._stuck:
            config, up = self.config, sum(line.is_live is True for line in self.worker_statuses())
            text = config.training.policy.shortfall_text(
                int(values.get("shortfall_batches", 0)), live=up, workers=config.data.workers,
                max_pending_batches=config.worker.max_pending_batches,
            )  # fmt: skip
            self.add_event(text, None)
        self._stuck = stuck

    def _evaluated(self, record: Metric) -> None:
        values = record.values
        if "version" in values and "loss" in values:
            self.history.evaluated(
                time_s=record.time_s,
                term=int(values.get("term", self.history.term)),
                version=int(values["version"]),
                loss=values["loss"],
                accuracy=values.get("accuracy"),
            )

    def observe_ends(self, now_s: float, ends: Sequence[int]) -> None:
        """The ends of the sample partitions, seen at monotonic `now_s`: the arrival rates come from them."""
        self._arrivals.observe(now_s, ends)

    def add_event(self, text: str, now_s: float | None) -> None:
        """Something happened that people should see (a death, a restart)."""
        at_s = math.nan if now_s is None else now_s - self._started_s
        self._events.append((at_s, text))
        self.all_events.append((at_s, text))

    @property
    def rate_is_stated(self) -> bool:
        """Whether the job file says how fast samples arrive; otherwise their rate is measured."""
        source, process = self.config.source, self.config.arrivals.process
        stated = process in ("poisson", "deterministic")
        return source is not None and not isinstance(source, StdinSource) and stated

    def arrival_rates_per_s(self) -> list[float]:
        """Samples per second of each stream: as stated in the job file, else as measured."""
        return self.config.rates_per_s() if self.rate_is_stated else self._arrivals.rates_per_s()

    def rate_predicted(self) -> float:
        """λ_U in theory, updates per second; NaN while no arrival is known."""
        rates, data = self.arrival_rates_per_s(), self.config.data
        if not sum(rates) > 0:
            return math.nan
        return self.config.training.policy.update_rate_per_s(rates, data.batch_size)

    def rate_measured(self) -> float:
        """λ_U in the steady part of the run, updates per second."""
        return steady_update_rate(self.history.updates.valid("time_s"))

    def margin(self) -> Margin:
        """Proposition 1 with the measured service time of a batch."""
        rates = self.arrival_rates_per_s()
        return stability_margin(rates, self.config.data.batch_size, self.config.group_size, self.history.service_s())

    def worker_statuses(self) -> tuple[WorkerStatus, ...]:
        """One line per worker slot, from the parameter server's last metrics."""
        values = self._metrics.get("ps", {})

        def number(worker: int, name: str) -> int | None:
            value = values.get(f"worker_{worker}_{name}")
            return None if value is None else int(value)

        lines = []
        for worker in range(self.config.data.workers):
            is_live = number(worker, "live")
            lines.append(
                WorkerStatus(
                    worker=worker,
                    is_live=None if is_live is None else bool(is_live),
                    session=number(worker, "session"),
                    retained_batches=number(worker, "retained_batches"),
                    lag_records=number(worker, "lag_records"),
                )
            )
        return tuple(lines)

    def metric(self, source: str, name: str) -> float | None:
        """The last value of one metric of one process."""
        return self._metrics.get(source, {}).get(name)

    def snapshot(self, now_s: float) -> JobSnapshot:
        """What is known at monotonic `now_s`."""
        history = self.history
        evaluation = history.evaluations.last()
        measured = self.rate_measured()
        return JobSnapshot(
            job=self.config.job,
            seconds=now_s - self._started_s,
            version=history.version,
            samples=history.samples_total,
            prequential=history.prequential.windowed(),
            held_out_version=None if evaluation is None else int(evaluation["version"]),
            held_out_loss=math.nan if evaluation is None else evaluation["loss"],
            held_out_accuracy=math.nan if evaluation is None else evaluation["accuracy"],
            rate_measured=measured,
            rate_predicted=self.rate_predicted(),
            rate_stated=self.rate_is_stated,
            margin=self.margin(),
            service_s=history.service_s(),
            durable_version=_int_or_none(self.metric("ps", "durable_version")),
            waiting_batches=_int_or_none(self.metric("ps", "waiting_batches")),
            workers=self.worker_statuses(),
            sent=_int_or_none(self.metric("producer", "delivered_total")),
            send_rate_per_s=_or_nan(self.metric("producer", "rate_per_s")),
            eta_s=self._eta_s(measured),
            ps_restarts=history.restarts,
            events=tuple(self._events),
            finished=history.finished.reason if history.finished else None,
            lost=tuple(Range(n, lo, hi) for n, spans in sorted(self._lost.items()) for lo, hi in spans),
        )

    def _eta_s(self, rate: float) -> float:
        target = self.config.stop.updates
        if target is None or not rate > 0:
            return math.nan
        return max(0.0, (target - self.history.version) / rate)


def _lost(record: Metric) -> Range | None:
    """What a worker that stops for it says (`WorkerChannel.lost`)."""
    lo, hi = (record.values.get(name, math.nan) for name in ("lost_from", "lost_until"))
    worker = record.source.removeprefix("worker-")
    if not (worker.isdecimal() and math.isfinite(lo) and math.isfinite(hi)):
        return None
    return Range(int(worker), int(lo), int(hi))


def _int_or_none(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else int(value)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
