"""The state of a running job for its page: the state of the terminal display, and the newest records. Pure.

The number of stored updates, dead letters and decisions is limited, so that memory does not grow with the run time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from doll.config import JobConfig
from doll.ledger.lineage import Lineage, LineageChange, UpdatesRecord
from doll.monitor.state.heartbeats import RoleHeartbeats
from doll.monitor.state.history import History
from doll.monitor.state.market_history import MarketHistory
from doll.monitor.state.progress import JobSnapshot, ProgressModel
from doll.monitor.state.served_model import ServedModel
from doll.process.metric_names import PROVISIONER
from doll.provisioner.decision import by_text
from doll.provisioner.planning.planner import slot_ranges
from doll.records.control import (
    AnyRecord,
    DeadLetter,
    Finished,
    Metric,
    ProvisionDecision,
    ServerStatus,
    TermStarted,
    Update,
)
from doll.storage.version_marks import VersionMarks


class Continuity:
    """Checks that the updates apply each offset once: in each partition, each batch must begin where the one before
    ended.

    `doll audit` also reads the checkpoint, the dead letters and the log, and takes longer the longer the job has run.
    This check takes a few operations per batch, so a page can show its result while the job runs.

    Attributes:
        until: per partition, one above the last offset in an update.
        offsets: number of offsets in the updates, including updates that a rollback has undone.
        missing, twice: number of offsets that no update contains, and number of offsets that two updates contain.
        problem: the first missing or repeated offset in words; "" if there is none.
    """

    def __init__(self) -> None:
        self._lineage = Lineage()
        self._begin()

    def _begin(self) -> None:
        self.until: dict[int, int] = {}
        self.offsets = self.missing = self.twice = 0
        self.problem = ""
        # For each update that can be undone: version, number of offsets, and the earlier `until` of its partitions.
        self._steps: deque[tuple[int, int, dict[int, int]]] = deque(maxlen=_MAX_STEPS)

    def feed(self, record: UpdatesRecord) -> None:
        """Process a record of `updates`."""
        change = self._lineage.feed(record)
        if change is LineageChange.FENCED:
            return
        if isinstance(record, TermStarted):
            if change is LineageChange.GENERATION:
                self._begin()
            self._take_back(record.resumed_version)
            if record.resumed_version == 0 or record.rolled_back_to >= 0:  # learned again, or skipped
                self.until = dict(enumerate(record.origins))
        elif isinstance(record, Update):
            self._add(record)

    def durable(self, version: int) -> None:
        """Record that updates up to `version` are in a checkpoint, so that they cannot be undone."""
        while self._steps and self._steps[0][0] <= version:
            self._steps.popleft()

    def _add(self, update: Update) -> None:
        before: dict[int, int] = {}
        offsets = 0
        for member in update.members:
            # The beginning of the log may have been deleted.
            until = self.until.get(member.partition, member.lo)
            if member.lo != until:
                self._differs(update.version, member.partition, until, member.lo)
            before.setdefault(member.partition, until)
            self.until[member.partition] = member.hi
            offsets += member.hi - member.lo
        self.offsets += offsets
        self._steps.append((update.version, offsets, before))

    def _differs(self, version: int, partition: int, until: int, lo: int) -> None:
        if lo > until:
            self.missing += lo - until
        else:
            self.twice += until - lo
        if not self.problem:
            what = f"{until}-{lo - 1} in no update" if lo > until else f"{lo}-{until - 1} in two updates"
            self.problem = f"partition {partition}: offsets {what}, by update {version}"

    def _take_back(self, version: int) -> None:
        while self._steps and self._steps[-1][0] > version:
            _, offsets, before = self._steps.pop()
            self.offsets -= offsets
            self.until |= before


MAX_LETTERS: Final = 200
MAX_PAYLOAD_BYTES: Final = 1_024  # limit for a dead letter
MAX_DECISIONS: Final = 200
MAX_EVENTS: Final = 500
_MAX_STEPS: Final = 100_000  # updates that can be undone; checkpoints are far more frequent

Event = tuple[float, str]  # Unix seconds, and the event in words


class ProcessEvent(msgspec.Struct, frozen=True):
    """An event of a process of a run on one machine.

    Attributes:
        restarted: the role or service that was restarted; "" if none was.
    """

    time_s: float
    text: str
    restarted: str = ""


@dataclass
class Decisions:
    """The decisions of the provisioner, in the form of its journal (`doll.provisioner.decision.Decision.to_dict`).

    Attributes:
        newest: the newest decision; empty before the first one.
        notable: decisions with actions, or with a new wanted state or new actions that a person must take.
        market: machines, prices and costs over time.
    """

    newest: Mapping[str, Any] = field(default_factory=dict)
    notable: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_DECISIONS))
    market: MarketHistory = field(default_factory=MarketHistory)

    def add(self, decision: Mapping[str, Any]) -> None:
        """Add the next decision. The same decision from journal and topic counts once."""
        self.market.feed(decision)
        if decision.get("turn") == self.newest.get("turn"):
            self.newest = {**decision, **self.newest}
            return
        changes = ("phase", "binding", "markets", "alarms")
        acts_anew = decision["actions"] and decision["actions"] != self.newest.get("actions")  # not a repeated attempt
        if acts_anew or any(decision.get(key) != self.newest.get(key) for key in changes):
            self.notable.append(decision)
        self.newest = decision

    def add_record(self, record: ProvisionDecision, measured: Mapping[str, float]) -> None:
        """Add a decision from the topic `metrics`.

        Args:
            measured: values of the provisioner's last `Metric`, which contains the other numbers.
        """
        fields = msgspec.to_builtins(record)
        reasons = by_text({slot: record.reasons[reason] for slot, reason in enumerate(record.reason_of)})
        self.add({**measured, **fields, "elapsed_s": record.time_s - record.started_s, "reasons": reasons})


@dataclass(frozen=True)
class KeptVersions:
    """The versions in a job's checkpoints, and their names."""

    versions: frozenset[int]
    marks: VersionMarks


@dataclass(frozen=True)
class PageState:
    """The state behind a page, of a running job or of a run that has ended.

    Attributes:
        now_s: Unix time of the newest record.
        is_live: whether new records may still arrive.
        report: content of `report.json`; empty before the end.
        continuity: None if only a report exists.
        silent_s: seconds since the last heartbeat of each role that is silent for longer than allowed.
        updates, letters, events: the newest ones, oldest first.
        last_events: last event of each worker.
        next_offsets, served_by: see `ProgressModel`.
        restarts: number of restarts of roles and services that this machine started.
        kept: versions in its checkpoints, read when a version is opened. None: not read, or not readable.
        served: state of its model server. None: no model server is watched.
        problem: reason why the page may not show the newest state; "" if it does.
    """

    config: JobConfig
    snapshot: JobSnapshot
    history: History
    decisions: Decisions
    now_s: float
    is_live: bool
    report: Mapping[str, Any] = field(default_factory=dict)
    continuity: Continuity | None = None
    silent_s: Mapping[str, float] = field(default_factory=dict)
    updates: Sequence[Update] = ()
    letters: Sequence[DeadLetter] = ()
    events: Sequence[Event] = ()
    last_events: Mapping[int, Event] = field(default_factory=dict)
    next_offsets: Mapping[int, int] = field(default_factory=dict)
    served_by: Mapping[int, int] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    kept: KeptVersions | None = None
    served: ServedModel | None = None
    problem: str = ""


class WatchedJob:
    """The state of a job, computed from the records of its topics `updates`, `metrics` and `dead`.

    Args:
        now_s: monotonic seconds; displayed times are relative to it.
        after_term: terms up to this one belong to earlier runs on the same topics.
    """

    def __init__(self, config: JobConfig, now_s: float, *, after_term: int = 0) -> None:
        self.progress = ProgressModel(config, now_s, after_term=after_term)
        self.decisions = Decisions()
        self._after_term = after_term
        self._heartbeats = RoleHeartbeats()
        self._measured: Mapping[str, float] = {}  # last numbers of the provisioner
        self._newest_s = 0.0
        self._restarts: Counter[str] = Counter()
        self._begin()

    def _begin(self) -> None:
        self._continuity = Continuity()
        self._letters: deque[DeadLetter] = deque(maxlen=MAX_LETTERS)
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._workers: dict[int, tuple[bool, int]] = {}  # whether it is live, and its number of restarts
        self._last_events: dict[int, Event] = {}  # of each worker

    def feed(self, record: AnyRecord) -> None:
        """Process a record; other types are ignored."""
        progress, history = self.progress, self.progress.history
        generation, num_events = history.generation, len(progress.all_events)
        progress.feed(record)
        if history.generation > generation:
            self._begin()
        self._heartbeats.feed(record)
        at_s = getattr(record, "time_s", 0.0)
        self._newest_s = max(self._newest_s, at_s)
        self._events.extend((at_s, text) for _, text in progress.all_events[num_events:])
        match record:
            case ProvisionDecision():
                self.decisions.add_record(record, self._measured)
            case Metric() if record.source == PROVISIONER and record.values:
                self._measured = record.values
            case DeadLetter() if record.code != "replayed" and history.is_current(record.term or self._after_term + 1):
                self._letters.append(msgspec.structs.replace(record, payload=record.payload[:MAX_PAYLOAD_BYTES]))
            case ServerStatus() if history.is_current(record.term):
                self._continuity.durable(record.durable_version)
                self._note_workers(record)
            case TermStarted() | Update() | Finished() if record.term > self._after_term:
                self._continuity.feed(record)
            case _:
                pass

    def note(self, event: ProcessEvent) -> None:
        """Record an event of a process."""
        self._events.append((event.time_s, event.text))
        if event.restarted:
            self._restarts[event.restarted] += 1

    def _note_workers(self, status: ServerStatus) -> None:
        """Record events of workers that have joined, left, or been replaced since the last status."""
        changed: dict[str, list[int]] = {}
        for worker in status.workers:
            before, now = self._workers.get(worker.worker), (worker.is_live, worker.restarts)
            if not worker.session or now == before:
                continue
            self._workers[worker.worker] = now
            replaced = before is not None and worker.restarts > before[1]
            text = ("replaced by a new process" if replaced else "live") if worker.is_live else "gone"
            changed.setdefault(text, []).append(worker.worker)
            self._last_events[worker.worker] = (status.time_s, text.partition(" ")[0])
        for text, workers in changed.items():
            subject = f"worker{'s' * (len(workers) > 1)} {slot_ranges(workers)}"
            self._events.append((status.time_s, f"{subject}: {text}"))

    def state(self, now_s: float, unix_s: float, *, problem: str = "") -> PageState:
        """Return the state at monotonic `now_s` and Unix `unix_s`. Its objects change with the next record."""
        progress, snapshot = self.progress, self.progress.snapshot(now_s)
        has_ended = snapshot.finished is not None
        return PageState(
            config=progress.config,
            snapshot=snapshot,
            history=progress.history,
            decisions=self.decisions,
            now_s=self._newest_s,
            is_live=not has_ended,
            continuity=self._continuity,
            silent_s={} if has_ended else self._heartbeats.silent(unix_s),
            updates=progress.newest_updates,
            letters=self._letters,
            events=self._events,
            last_events=self._last_events,
            next_offsets=progress.next_offsets,
            served_by=progress.served_by,
            restarts=self._restarts,
            problem="" if has_ended else problem,  # all records of an ended job have been read
        )
