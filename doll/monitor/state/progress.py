"""The state of a running job, computed from its records; `doll.monitor.views` displays it. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from doll.amounts import clock, or_nan
from doll.config import JobConfig
from doll.ledger import offset_ranges
from doll.ledger.balance import Range, named
from doll.ledger.offset_ranges import Span
from doll.monitor.state.challengers import NoticedDrift, challenger_advice
from doll.monitor.state.freshness import FreshnessProgress, StageFreshness
from doll.monitor.state.history import HeldOutRecords, History
from doll.monitor.state.join_progress import JoinCounts, JoinProgress
from doll.monitor.state.limit_text import divergence_text, limit_text
from doll.monitor.state.policy_summary import PolicySummary
from doll.monitor.state.prequential import Means
from doll.monitor.state.rates import (
    DROP_S,
    ArrivalRateEstimator,
    WorkerRates,
    remaining_sd_s,
    stability_margin,
    steady_update_rate,
)
from doll.process import metric_names as names
from doll.records.control import (
    AnyRecord,
    Measures,
    Metric,
    ServedStatus,
    ServerStatus,
    ShardStatus,
    TableStatus,
    TermStarted,
    Update,
    WorkerStatus,
)
from doll.theory.queueing import Stability

EventKind = Literal["server", "worker", "records", "model", "gate", "alias", "drift", "alarm", "end", "job"]

EVENTS_KEPT = 6
# Rates are measured from `DROP_S` after the start, and over at least the same time.
MIN_SPAN_FOR_RATE_S = 2 * DROP_S
MIN_UPDATES_FOR_RATE = 5
MAX_UPDATES: Final = 200  # number of newest updates that are kept with their batches:
MAX_MEMBERS: Final = 20_000  # one update of a job with 1,000 workers may have this many
STALL_REPORT_S = 10.0  # while a worker is replaced, the others may briefly have no batches


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """The state of one worker. Unknown values are None, NaN or "".

    Attributes:
        is_live: None before the first process of this worker has joined.
        state_s: seconds since the worker joined, or since it left.
        since_s: Unix time of this change.
        market: market of its machine, as reported by the worker: "spot", "on_demand" or "".
        control: channel of its grants and pushes: "local", "redis", "kafka", or "" if the worker is not live.
        restarts: number of processes that have replaced an earlier one of this worker.
        rate_per_s, computing, waiting_s: see `doll.monitor.state.rates.WorkerPace`.
        batch_s: time for one of its batches, from grant to push.
        machine: its machine in words; "" if none is provisioned.
        slow: description of its slowness; "" if it is not slow.
        is_spare: whether it is live and serves no partition.
        waiting_for: reason why it cannot decode records now; "" if it can.
    """

    worker: int
    is_live: bool | None = None
    state_s: float = math.nan
    since_s: float = math.nan
    market: str = ""
    control: str = ""
    restarts: int | None = None
    rate_per_s: float = math.nan
    computing: float = math.nan
    waiting_s: float = math.nan
    partitions: int | None = None
    batch_s: float = math.nan
    retained_batches: int | None = None
    lag_records: int | None = None
    machine: str = ""
    usd: float = math.nan
    slow: str = ""
    is_spare: bool = False
    waiting_for: str = ""


@dataclass(frozen=True, slots=True)
class DeadLetterCounts:
    """The dead letters of the batches that are in updates.

    Attributes:
        reasons: each reason with its number of dead letters, in order of first occurrence.
        recent_refused: number of refused records among the last `recent_records` records (`data.on_bad_records`).
    """

    reasons: tuple[tuple[str, int], ...] = ()
    recent_records: int = 0
    recent_refused: int = 0

    @property
    def letters(self) -> int:
        """The number of dead letters."""
        return sum(letters for _, letters in self.reasons)

    def text(self) -> str:
        """Return a text such as `1,008 dead letters (63 of the last 100,000 records), most of them: ...`; or ""."""
        if not self.reasons:
            return ""
        reason, letters = max(self.reasons, key=lambda item: item[1])
        most = "" if len(self.reasons) == 1 else f"most of them ({letters:,}) "
        recent = (
            f" ({self.recent_refused:,} of the last {self.recent_records:,} records)" if self.recent_records else ""
        )
        return f"{self.letters:,} dead letter{'s' * (self.letters > 1)}{recent}: {most}{reason}"


def skipped_text(skipped: Sequence[tuple[str, int]]) -> str:
    """Return a text such as `1,008 samples skipped: 1,000 tombstone, 8 bot`; "" if no sample was skipped."""
    if not skipped:
        return ""
    total = sum(samples for _, samples in skipped)
    return f"{total:,} samples skipped: " + ", ".join(f"{samples:,} {reason}" for reason, samples in skipped)


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The state of a job at one moment. Unknown numbers are NaN or None."""

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
    margin: Stability
    service_s: float
    durable_version: int | None
    workers: tuple[WorkerLine, ...]
    ps_restarts: int
    finished: str | None
    waiting_batches: int | None = None
    sent: int | None = None
    send_rate_per_s: float = math.nan
    eta_s: float = math.nan
    eta_sd_s: float = math.nan
    events: tuple[tuple[float, str], ...] = ()
    lost: tuple[Range, ...] = ()  # offsets that were deleted before they were learned
    costs: str = ""  # machines and their cost, if they are provisioned
    policy: PolicySummary | None = None  # the staleness and the cost of its consistency policy
    updates: int = 0  # updates that learned a sample, as a stop rule counts them
    dead: DeadLetterCounts = DeadLetterCounts()
    skipped: tuple[tuple[str, int], ...] = ()  # number of samples that the task has skipped, by reason
    limit: str = ""  # the factor that limits the job, and the remedy
    tables: tuple[TableStatus, ...] = ()  # only bounded tables
    shards: tuple[ShardStatus, ...] = ()  # none: the server has the whole model
    join: JoinCounts | None = None  # None: the job has no data.join
    history: str = ""  # the part of a source's history that has been sent
    freshness: tuple[StageFreshness, ...] = ()  # of the stages that any record has reached
    held_out_records: HeldOutRecords | None = None  # None: no record was held out of the stream


class ProgressModel:
    """The state of a job, computed from the records of its topics `updates` and `metrics`.

    Args:
        started_s: monotonic seconds at the start; displayed times are relative to it.
        after_term: terms up to this one belong to earlier runs on the same topics.
        on_event: function that is called with the kind and the text of each event.
    """

    def __init__(
        self, config: JobConfig, started_s: float, *, after_term: int = 0,
        on_event: Callable[[EventKind, str], object] = lambda kind, text: None,
    ) -> None:  # fmt: skip
        self.config = config
        self.on_event = on_event
        self.history = History(after_term=after_term)
        self._started_s = started_s
        self._metrics: dict[str, Mapping[str, float]] = {}
        self._join = JoinProgress()
        self.freshness = FreshnessProgress(config.freshness)
        self._arrivals = ArrivalRateEstimator(config.data.samples_per_record)
        self._status: ServerStatus | None = None
        self._measures: dict[int, Measures] = {}  # the last ones of each term
        self._gone_since_s: dict[int, float] = {}  # Unix seconds of the first status without an absent worker
        self._worker_rates = WorkerRates()
        self._slow_workers: set[int] = set()
        self._drifts: set[tuple[str, float]] = set()  # metric and version of those that are among the events
        self.drifts: list[NoticedDrift] = []  # of metrics
        self._has_diverged = False
        self._waiting: dict[int, str] = {}  # the reason why a worker cannot decode records
        self._lost: dict[int, list[Span]] = {}
        self._newest: deque[Update] = deque()
        self._num_members = 0
        self.next_offsets: dict[int, int] = {}  # per partition: one above the last offset in an update
        self.served_by: dict[int, int] = {}  # per partition: the worker of the last batch in an update
        self._events: deque[tuple[float, str]] = deque(maxlen=EVENTS_KEPT)
        self.all_events: list[tuple[float, str]] = []

    def feed(self, record: AnyRecord) -> None:
        """Process a record of `updates` or `metrics`; other types are ignored."""
        restarts, generation = self.history.restarts, self.history.generation
        match record:
            case ServerStatus():
                if self.history.is_current(record.term):
                    self._set_status(record)
            case ServedStatus() if self.history.is_current(record.term):
                self.freshness.feed(record)
            case Metric():
                term = record.values.get(names.TERM)
                if record.values and (term is None or self.history.is_current(int(term))):
                    self._measured(record)
            case _:
                self.history.feed(record)
        if self.history.generation > generation:
            self._metrics.clear()
            self._lost.clear()
            self._status = None
            self._measures.clear()
            self.freshness = FreshnessProgress(self.config.freshness)
            self._gone_since_s.clear()
            self._newest.clear()
            self._num_members = 0
            self._worker_rates = WorkerRates()
        if isinstance(record, TermStarted) and record.resumed_version == 0:
            self.next_offsets = dict(enumerate(record.origins))
        elif isinstance(record, Update):
            if record.version == self.history.version:
                self._keep(record)
            if (diverged := self.diverged) and not self._has_diverged:
                self.add_event(diverged, None, "model")
            self._has_diverged = bool(diverged)
            for member in record.members:
                self.next_offsets[member.partition] = member.hi
                self.served_by[member.partition] = member.worker
                computing_s = member.fetch_s + member.compute_s + member.store_s
                self._worker_rates.add(member.worker, record.time_s, member.n_samples, computing_s, member.wait_s)
                for lo, hi in member.lost:
                    self.add_lost(member.partition, lo, hi)
        if self.history.restarts > restarts:
            self.add_event(f"parameter server resumed from version {self.history.version}", None, "server")

    @property
    def newest_updates(self) -> Sequence[Update]:
        """The newest updates with their batches, oldest first."""
        return self._newest

    def _keep(self, update: Update) -> None:
        self._newest.append(update)
        self._num_members += len(update.members)
        while len(self._newest) > MAX_UPDATES or (self._num_members > MAX_MEMBERS and len(self._newest) > 1):
            self._num_members -= len(self._newest.popleft().members)

    def _measured(self, record: Metric) -> None:
        if names.GATE_PASSED in record.values:
            self._judged(record.values)
            return
        if names.MOVED_BACK in record.values:
            version, to = record.values[names.MOVED_BACK], record.values.get(names.MOVED_BACK_TO, math.nan)
            self.add_event(f"version {version:.0f} was moved back to {to:.0f}: worse on live records", None, "alias")
            return
        if names.DRIFT in record.values:
            self._drifted(record.values, record.time_s)
            return
        self._metrics[record.source] = record.values
        self._join.feed(record)
        if record.source == names.EVALUATOR:
            self._evaluated(record)
        elif (lost := _lost(record)) is not None:
            self.add_lost(*lost)

    def _set_status(self, status: ServerStatus) -> None:
        self.freshness.feed(status)
        if status.measures is not None:
            self._measures[status.term] = status.measures
        for worker in status.workers:
            if worker.is_live:
                self._gone_since_s.pop(worker.worker, None)
            elif worker.session:
                self._gone_since_s.setdefault(worker.worker, status.time_s)
        was_stalled = self._status is not None and self._status.stalled_s >= STALL_REPORT_S
        if status.stalled_s >= STALL_REPORT_S and not was_stalled:
            live = sum(worker.is_live for worker in status.workers)
            text = self.config.training.policy.shortfall_text(
                status.shortfall_batches,
                live=live,
                workers=status.num_workers or self.config.data.workers,
                max_pending_batches=self.config.worker.max_pending_batches,
            )
            self.add_event(self.explained(text), None, "worker")
        for worker in status.workers:
            text = self._slow(worker)
            if text and worker.worker not in self._slow_workers:
                self.add_event(f"worker {worker.worker}: {text}", None, "worker")
            (self._slow_workers.add if text else self._slow_workers.discard)(worker.worker)
            if worker.waiting_for and worker.waiting_for != self._waiting.get(worker.worker):
                self.add_event(f"worker {worker.worker} waits: {worker.waiting_for}", None, "worker")
            self._waiting[worker.worker] = worker.waiting_for
        had_dead = self.dead_letters().letters > 0
        self._status = status
        if not had_dead and (dead := self.dead_letters().text()):
            self.add_event(self.explained(f"{dead}; see doll dead list"), None, "records")

    def _slow(self, worker: WorkerStatus) -> str:
        """Return a text on how slow this worker is, compared with the time limit of a batch; "" if it is not slow."""
        limit_s = self.config.worker.grant_timeout_s
        if not worker.is_live:
            return ""
        if worker.batch_s <= limit_s / 2:
            return f"no gradient within {worker.time_limit_s:.3g} s" if worker.is_stalled else ""
        size = self.config.training.policy.batches_per_push
        wave = f" for a push of {size} batches" if size > 1 else ""
        return (
            f"{worker.batch_s:.3g} s per batch, limit raised to {worker.time_limit_s:.3g} s{wave} "
            f"(worker.grant_timeout_s: {limit_s:g})"
        )

    def add_lost(self, partition: int, lo: int, hi: int) -> None:
        """Record that offsets [lo, hi) of a partition were deleted before they were learned."""
        known = self._lost.get(partition, [])
        self._lost[partition] = offset_ranges.union([*known, (lo, hi)])
        if self._lost[partition] != known:
            self.add_event(
                f"records lost: {named([Range(partition, lo, hi)])}: deleted before they were learned "
                f"(data.on_data_loss: {self.config.data.on_data_loss})",
                None,
                "records",
            )

    def _judged(self, values: Mapping[str, float]) -> None:
        if not values[names.GATE_PASSED]:
            prefix = f"{names.GATE_PASSED}_"
            failed = ", ".join(name.removeprefix(prefix) for name, ok in values.items() if prefix in name and not ok)
            version = values.get(names.GATE_VERSION, math.nan)
            self.add_event(f"version {version:.0f} was held back: {failed} (doll versions show)", None, "gate")
        else:
            self.on_event("alias", f"version {values.get(names.GATE_VERSION, math.nan):.0f} has passed its gates")

    def _drifted(self, values: Mapping[str, float], time_s: float) -> None:
        prefix = f"{names.DRIFT}_version_"
        metric = next((name.removeprefix(prefix) for name in values if name.startswith(prefix)), "")
        before, after, since, version, index = (
            values.get(f"{names.DRIFT}_{fact}_{metric}", math.nan)
            for fact in ("before", "after", "since", "version", "index")
        )
        if (metric, version) in self._drifts:  # from an evaluator that was started again
            return
        self._drifts.add((metric, version))
        change = f"went from {before:.4g} to {after:.4g}"
        if index > 0:
            change = (
                f"has another distribution (stability index {index:.2g}, mean {before:.4g} before, {after:.4g} now)"
            )
        text = f"drift: {metric} {change} between versions {since:,.0f} and {version:,.0f}"
        if not index > 0 and version >= 0:
            self.drifts.append(NoticedDrift(metric, int(version), time_s))
            text += challenger_advice(self.config, int(version))
        self.add_event(text, None, "drift")

    def _evaluated(self, record: Metric) -> None:
        values = record.values
        if names.VERSION in values and names.LOSS in values:
            self.history.evaluated(
                time_s=record.time_s,
                term=int(values.get(names.TERM, self.history.term)),
                version=int(values[names.VERSION]),
                loss=values[names.LOSS],
                metrics={
                    name: value
                    for name, value in values.items()
                    if name not in names.OF_EVALUATIONS
                    and not name.startswith(
                        (names.PREQUENTIAL_WINDOW, names.PREQUENTIAL_FADING, names.HELD_OUT_RECORDS)
                    )
                },
            )

    def observe_ends(self, now_s: float, ends: Sequence[int]) -> None:
        """Process the end offsets of the sample partitions at monotonic `now_s`, to measure arrival rates."""
        self._arrivals.observe(now_s, ends)

    def add_event(self, text: str, now_s: float | None, kind: EventKind = "job") -> None:
        """Add an event, such as a restart, for the display and the report."""
        self.on_event(kind, text)
        at_s = math.nan if now_s is None else now_s - self._started_s
        self._events.append((at_s, text))
        self.all_events.append((at_s, text))

    @property
    def rate_is_stated(self) -> bool:
        """Whether the job file states the arrival rate of samples; otherwise the rate is measured."""
        return self.config.states_rate

    def arrival_rates_per_s(self) -> list[float]:
        """Return the arrival rate of each worker's streams, samples per second, as stated or as measured."""
        rates = self.config.rates_per_s() if self.rate_is_stated else self._arrivals.rates_per_s()
        return self.config.data.by_worker(rates) if rates else []

    def rate_predicted(self) -> float:
        """Return the theoretical λ_U, updates per second; NaN if no arrival rate is known."""
        rates, data = self.arrival_rates_per_s(), self.config.data
        if not sum(rates) > 0:
            return math.nan
        return self.config.training.policy.update_rate_per_s(rates, data.batch_size)

    def rate_measured(self) -> float:
        """Return λ_U in the steady part of the run, updates per second; NaN during the start of the run.

        The first updates contain records that had waited, so they follow each other faster than the later updates.
        """
        times_s = self.history.updates.valid("time_s")
        is_over = len(times_s) > MIN_UPDATES_FOR_RATE and times_s[-1] - times_s[0] >= MIN_SPAN_FOR_RATE_S
        return steady_update_rate(times_s) if is_over else math.nan

    def margin(self) -> Stability:
        """Return Proposition 1 with the measured service time of a batch; NaN if the proposition does not apply."""
        if not self.config.training.policy.serial_updates:
            return Stability(math.nan, math.nan)
        rates = self.arrival_rates_per_s()
        return stability_margin(rates, self.config.data.batch_size, self.config.group_size, self.history.service_s())

    @property
    def num_workers(self) -> int:
        """The number of workers that the job should have now."""
        return (0 if self._status is None else self._status.num_workers) or self.config.data.workers

    def worker_lines(self) -> tuple[WorkerLine, ...]:
        """Return one line for each worker of the job and for each spare, from the parameter server's newest status."""
        status = self._status
        now_s = 0.0 if status is None else status.time_s
        workers = {} if status is None else {worker.worker: worker for worker in status.workers}
        lines = []
        for slot in sorted({*range(self.num_workers), *(slot for slot, item in workers.items() if item.is_spare)}):
            worker = workers.get(slot)
            if worker is None or not worker.session:
                lines.append(WorkerLine(slot))
                continue
            since_s = worker.live_since_s if worker.is_live else self._gone_since_s.get(slot, math.nan)
            pace = self._worker_rates.pace(slot)
            lines.append(
                WorkerLine(
                    worker=slot,
                    is_live=worker.is_live,
                    is_spare=worker.is_spare,
                    state_s=max(0.0, now_s - since_s),
                    since_s=since_s,
                    market=worker.market,
                    control=worker.control if worker.is_live else "",
                    restarts=worker.restarts,
                    rate_per_s=pace.samples_per_s,
                    computing=pace.computing,
                    waiting_s=pace.waiting_s,
                    partitions=worker.partitions,
                    batch_s=worker.batch_s or math.nan,
                    retained_batches=worker.retained_batches,
                    lag_records=worker.lag_records,
                    slow=self._slow(worker),
                    waiting_for=worker.waiting_for if worker.is_live else "",
                )
            )
        return tuple(lines)

    def policy_summary(self) -> PolicySummary | None:
        """Return the reads, times and bytes of the policy, over all terms; None before the first status."""
        return PolicySummary.total(self._measures.values())

    def metric(self, source: str, name: str) -> float | None:
        """Return the last value of one metric of one process."""
        return self._metrics.get(source, {}).get(name)

    def snapshot(self, now_s: float) -> JobSnapshot:
        """Return the state at monotonic `now_s`."""
        history = self.history
        evaluation = history.evaluations.last()
        measured, left = self.rate_measured(), self.updates_left()
        sent = self.metric(names.PRODUCER, names.DELIVERED_TOTAL)
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
            durable_version=None if self._status is None else self._status.durable_version,
            waiting_batches=None if self._status is None else self._status.waiting_batches,
            workers=self.worker_lines(),
            sent=None if sent is None or not math.isfinite(sent) else int(sent),
            send_rate_per_s=or_nan(self.metric(names.PRODUCER, names.RATE_PER_S)),
            eta_s=left / measured if measured > 0 else math.nan,
            eta_sd_s=remaining_sd_s(history.updates.valid("time_s"), left),
            ps_restarts=history.restarts,
            events=tuple(self._events),
            finished=history.finished.reason if history.finished else None,
            lost=tuple(Range(n, lo, hi) for n, spans in sorted(self._lost.items()) for lo, hi in spans),
            policy=self.policy_summary(),
            updates=history.learned_updates,
            dead=self.dead_letters(),
            skipped=self.skipped(),
            limit=self.diverged or limit_text(self.config, self._status),
            tables=() if self._status is None else self._status.tables,
            shards=() if self._status is None else self._status.shards,
            join=self.join(),
            history=self.history_sent(),
            freshness=self.freshness.stages(),
            held_out_records=history.held_out_records(),
        )

    @property
    def diverged(self) -> str:
        """How far the loss has risen and the remedy, if the model diverges; otherwise ""."""
        return divergence_text(self.config, self.history.loss_trend)

    def explained(self, problem: str) -> str:
        """Return the problem; behind the divergence of the model, if it diverges: samples and workers that look faulty
        then are its consequence."""
        return f"{diverged} ({problem})" if (diverged := self.diverged) else problem

    def waits_for_more(self) -> bool:
        """Return whether no worker computes because the batches after the checkpoint are too few for an update."""
        status = self._status
        if status is None or status.computing_batches or any(worker.is_stalled for worker in status.workers):
            return False
        return any(worker.retained_batches for worker in status.workers)

    def dead_letters(self) -> DeadLetterCounts:
        """Return the dead letters so far, from the parameter server's newest status."""
        status = self._status
        if status is None:
            return DeadLetterCounts()
        return DeadLetterCounts(status.dead_reasons, status.recent_records, status.recent_refused)

    def join(self) -> JoinCounts | None:
        """Return the state of the job's join; None: the job has no `data.join`."""
        if self.config.data.join is None:
            return None
        return self._join.counts(0.0 if self._status is None else self._status.time_s)

    def history_sent(self) -> str:
        """Return which part of the table of a source of kind history has been sent; "": all of it, or none is known."""
        rows, total, left_s = (
            or_nan(self.metric(names.PRODUCER, name))
            for name in (names.HISTORY_ROWS, names.HISTORY_TOTAL, names.HISTORY_LEFT_S)
        )
        if not rows < total:
            return ""
        left = f", about {clock(left_s)} left" if 0 < left_s < math.inf else ""
        return f"{rows:,.0f} of {total:,.0f} rows sent ({rows / total:.0%}){left}"

    def skipped(self) -> tuple[tuple[str, int], ...]:
        """Return the number of skipped samples by reason, from the parameter server's newest status."""
        return () if self._status is None else self._status.skipped

    def updates_left(self) -> float:
        """Return the expected number of updates until the stop rule (updates or samples); NaN without such a rule."""
        history, stop = self.history, self.config.stop
        done = history.learned_updates
        left: list[float] = [] if stop.updates is None else [stop.updates - done]
        if stop.samples is not None and history.samples_total:
            left.append((stop.samples - history.samples_total) * done / history.samples_total)
        return max(0.0, min(left)) if left and history.finished is None else math.nan


def _lost(record: Metric) -> Range | None:
    """Return the records that a worker reports as lost when it stops because of them."""
    lost = [record.values.get(name, math.nan) for name in (names.LOST_PARTITION, names.LOST_FROM, names.LOST_UNTIL)]
    if names.worker_of(record.source) is None or not all(map(math.isfinite, lost)):
        return None
    partition, lo, hi = map(int, lost)
    return Range(partition, lo, hi)
