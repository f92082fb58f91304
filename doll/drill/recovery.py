"""How long a job needs after each fault until its model moves again. Pure: times are arguments."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from doll.drill.plan import Fault
from doll.records import AnyRecord, TermStarted, Update

_RECENT = 500  # updates that may come before Kafka says where a record is


@dataclass(slots=True)
class PoisonTracker:
    """Records that were put into a stream and that nobody shall learn from.

    Attributes:
        records: how many.
        harmless: how many of them a model may happen to get right; nothing is learned from these either.
        offsets: where Kafka has put them, as far as it has said so.
        dead: those that an update counts as dead.
        learned: those that an update counts as applied.
        seen_s: when an update last had a batch of this stream that begins before them: the stream is on its way there.
    """

    partition: int
    records: int
    harmless: int = 0
    offsets: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    learned: set[int] = field(default_factory=set)
    seen_s: float = 0.0

    def on_update(self, update: Update) -> None:
        """What an update says of them; one that comes later is right."""
        for member in update.members:
            if member.worker == self.partition:
                if member.lo <= max(self.offsets, default=member.lo):
                    self.seen_s = max(self.seen_s, update.time_s)
                here = {offset for offset in self.offsets if member.lo <= offset < member.hi}
                dead = here.intersection(member.dead)
                self.dead = self.dead - here | dead
                self.learned = self.learned - here | (here - dead)

    @property
    def is_counted(self) -> bool:
        """Whether each is dead in an update, but for those that may be harmless."""
        return len(self.dead) + len(self.learned) == self.records and len(self.learned) <= self.harmless


@dataclass(slots=True)
class InjectedFault:
    """A fault that has happened.

    Attributes:
        time_s: wall clock, as in `Update.time_s`.
        after_term: the update that ends it is of a later parameter server than this one; -1: of any.
        term: the newest parameter server's when it happened.
        restored_s: until then a server that is cut off may still apply what it has, and tell nobody.
        poison: the records that updates must have counted before it is ended.
        left: what was told to leave has done so, or nothing was.
        recovery_s: from the fault to the first update that came after it; None while there is none.
    """

    fault: Fault
    time_s: float
    after_term: int
    term: int
    restored_s: float
    poison: PoisonTracker | None = None
    left: bool = True
    recovery_s: float | None = None

    @property
    def waiting_since_s(self) -> float:
        """Since when nothing shows that it will end. A poison record waits for its turn in a stream that is behind."""
        return max(self.time_s, self.poison.seen_s if self.poison is not None else 0.0)

    def is_ended_by(self, update: Update) -> bool:
        """Whether this update shows that the job goes on."""
        if not self.left or (self.poison is not None and not self.poison.is_counted):
            return False
        if update.term > self.term:
            return update.time_s > self.time_s
        return update.term > self.after_term and update.time_s > max(self.time_s, self.restored_s)


class RecoveryTracker:
    """Faults, and the updates that show that the job goes on. Feed it each record of `updates`."""

    def __init__(self) -> None:
        self.injected: list[InjectedFault] = []
        self._term = 0
        self._open: list[InjectedFault] = []
        self._recent: deque[Update] = deque(maxlen=_RECENT)

    def inject(self, fault: Fault, time_s: float, poison: PoisonTracker | None = None) -> InjectedFault:
        """A fault happens now."""
        # A message may be on its way when its sender dies: only the successor's updates show that there is one.
        of_ps = fault.kind.target == "ps"
        above = self._term if of_ps and fault.kind.action in ("kill", "zombie", "preempt") else -1
        restored_s = time_s + fault.hold_s if of_ps and fault.kind.cut_from is not None else time_s
        one = InjectedFault(fault, time_s, above, self._term, restored_s, poison)
        one.left = fault.kind.action != "malformed_notice"
        self.injected.append(one)
        self._open.append(one)
        return one

    def add_poison_offset(self, one: InjectedFault, offset: int) -> None:
        """Kafka has put one of the poison records there: updates that count it may have come already."""
        assert one.poison is not None
        one.poison.offsets.add(offset)
        for update in self._recent:
            self._take(update)

    def feed(self, record: AnyRecord) -> None:
        """A record of the `updates` topic."""
        match record:
            case TermStarted():
                self._term = max(self._term, record.term)
            case Update():
                self._term = max(self._term, record.term)
                self._recent.append(record)
                self._take(record)
            case _:
                pass

    def _take(self, update: Update) -> None:
        for one in self.injected:
            if one.poison is not None:
                one.poison.on_update(update)  # also after the recovery: a later update may count the batch again
        for one in self._open:
            if one.is_ended_by(update):
                one.recovery_s = update.time_s - one.time_s
        self._open = [one for one in self._open if one.recovery_s is None]

    @property
    def open(self) -> tuple[InjectedFault, ...]:
        """Faults that no update has followed yet, in order."""
        return tuple(self._open)

    def report(self) -> dict[str, Any]:
        """What `report.json` says of a drill. `ps_recovery_s` is of the parameter server's deaths by SIGKILL alone."""
        by_kind: dict[str, list[InjectedFault]] = {}
        for one in self.injected:
            by_kind.setdefault(one.fault.kind.name, []).append(one)
        deaths = [one for one in self.injected if one.fault.kind.name == "ps_kill"]
        return {
            "faults": dict(sorted(Counter(one.fault.kind.name for one in self.injected).items())),
            "recoveries": len(self.injected) - len(self._open),
            "recovery_s": _spread(self.injected),
            "ps_recovery_s": _spread(deaths),
            "recovery_s_by_kind": {name: _spread(found) for name, found in sorted(by_kind.items())},
        }


def _spread(injected: Iterable[InjectedFault]) -> dict[str, float | None]:
    found = [one.recovery_s for one in injected if one.recovery_s is not None]
    return {
        "p50": round(statistics.median(found), 3) if found else None,
        "max": round(max(found), 3) if found else None,
    }


def table(report: Mapping[str, Any]) -> list[str]:
    """The drill's part of a report as lines for people."""
    rows = [("fault", "times", "p50 s", "max s")]
    for name, count in report["faults"].items():
        rows.append((name, str(count), *_cells(report["recovery_s_by_kind"][name])))
    rows.append(("all", str(sum(report["faults"].values())), *_cells(report["recovery_s"])))
    lines = [f"  {name:<20}{times:>6}{p50:>9}{most:>9}" for name, times, p50, most in rows]
    audit = report["audit"]
    per_record = report["batch_size"] // report["records_per_batch"]
    lost, twice = (
        ("not known: no audit",) * 2
        if audit is None
        else (str(audit["missing"] * per_record), str(audit["duplicate"] * per_record))
    )
    return [
        "drill: seconds from a fault to the next update",
        *lines,
        f"  recoveries {report['recoveries']} of {sum(report['faults'].values())}, samples lost {lost}, "
        f"samples twice {twice}",
    ]


def _cells(spread: Mapping[str, float | None]) -> tuple[str, str]:
    p50, most = ("-" if spread[name] is None else f"{spread[name]:.2f}" for name in ("p50", "max"))
    return p50, most
