"""Recovery times: from each fault to the next update of the model. Pure: times are arguments."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from doll.ledger.lineage import Lineage, UpdatesRecord
from doll.records.control import AnyRecord, Update

from doll_lab.drill.plan import Fault

_RECENT = 500  # updates that are kept until Kafka acknowledges a poison record with its offset


@dataclass(slots=True)
class PoisonTracker:
    """The poison records of one fault, and the updates that count them.

    Attributes:
        records: number of records.
        harmless: number of records that the model may classify correctly; they have no effect on it.
        offsets: offsets of the records that Kafka has acknowledged.
        dead: offsets that an update counts as dead.
        learned: offsets that an update counts as applied.
        seen_s: time of the newest update with a batch of this stream that begins before them: the stream advances.
    """

    partition: int
    records: int
    harmless: int = 0
    offsets: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    learned: set[int] = field(default_factory=set)
    seen_s: float = 0.0

    def on_update(self, update: Update) -> None:
        """Process the counts of an update; a later update overrides an earlier one."""
        for member in update.members:
            if member.partition == self.partition:
                if member.lo <= max(self.offsets, default=member.lo):
                    self.seen_s = max(self.seen_s, update.time_s)
                here = {offset for offset in self.offsets if member.lo <= offset < member.hi}
                dead = here.intersection(member.dead)
                self.dead = self.dead - here | dead
                self.learned = self.learned - here | (here - dead)

    @property
    def is_counted(self) -> bool:
        """Return whether updates count all records as dead, except at most `harmless` of them."""
        return len(self.dead) + len(self.learned) == self.records and len(self.learned) <= self.harmless


@dataclass(slots=True)
class InjectedFault:
    """A fault that was injected.

    Attributes:
        time_s: wall clock, as in `Update.time_s`.
        after_term: the update that ends the fault must be of a later term than this one; -1: of any term.
        term: newest term when the fault was injected.
        restored_s: time until which a disconnected server may apply pushes that it has, without publishing them.
        poison: records that updates must count before the fault has ended.
        recovery_s: seconds from the fault to the first update after it; None before this update.
    """

    fault: Fault
    time_s: float
    after_term: int
    term: int
    restored_s: float
    poison: PoisonTracker | None = None
    recovery_s: float | None = None

    @property
    def waiting_since_s(self) -> float:
        """Time since which recovery has made no progress. A poison record waits while its stream catches up."""
        return max(self.time_s, self.poison.seen_s if self.poison is not None else 0.0)

    def is_ended_by(self, update: Update) -> bool:
        """Return whether this update shows that the job has recovered."""
        if self.poison is not None and not self.poison.is_counted:
            return False
        if update.term > self.term:
            return update.time_s > self.time_s
        return update.term > self.after_term and update.time_s > max(self.time_s, self.restored_s)


class RecoveryTracker:
    """The tracker that matches faults with the updates that show recovery. Pass it each record of `updates`."""

    def __init__(self) -> None:
        self.injected: list[InjectedFault] = []
        self._lineage = Lineage()
        self._open: list[InjectedFault] = []
        self._recent: deque[Update] = deque(maxlen=_RECENT)

    def inject(self, fault: Fault, time_s: float, poison: PoisonTracker | None = None) -> InjectedFault:
        """Record a fault that is injected now."""
        # An update of the dead server may still be in transit: only an update of a later term shows a successor.
        of_ps = fault.kind.target == "ps"
        after_term = self._lineage.newest_term if of_ps and fault.kind.action in ("kill", "zombie", "preempt") else -1
        # Without control links, it continues through Kafka.
        is_cut_off = of_ps and fault.kind.cut_from in ("kafka", "redis")
        restored_s = time_s + fault.hold_s if is_cut_off else time_s
        injected = InjectedFault(fault, time_s, after_term, self._lineage.newest_term, restored_s, poison)
        self.injected.append(injected)
        self._open.append(injected)
        return injected

    def add_poison_offset(self, injected: InjectedFault, offset: int) -> None:
        """Record the offset of a poison record; updates that count it may have arrived before."""
        assert injected.poison is not None
        injected.poison.offsets.add(offset)
        for update in self._recent:
            self._take(update)

    def feed(self, record: AnyRecord) -> None:
        """Process a record of the `updates` topic."""
        if isinstance(record, UpdatesRecord):
            self._lineage.feed(record)
        if isinstance(record, Update):
            self._recent.append(record)
            self._take(record)

    def _take(self, update: Update) -> None:
        for injected in self.injected:
            if injected.poison is not None:
                injected.poison.on_update(update)  # also after recovery: a later update may count the batch again
        for injected in self._open:
            if injected.is_ended_by(update):
                injected.recovery_s = update.time_s - injected.time_s
        self._open = [injected for injected in self._open if injected.recovery_s is None]

    @property
    def open(self) -> tuple[InjectedFault, ...]:
        """The faults without recovery so far, in order."""
        return tuple(self._open)

    def report(self) -> dict[str, Any]:
        """Return the drill's fields in `report.json`. `ps_recovery_s` covers only SIGKILLs of the parameter server."""
        by_kind: dict[str, list[InjectedFault]] = {}
        for injected in self.injected:
            by_kind.setdefault(injected.fault.kind.name, []).append(injected)
        return {
            "faults": {name: len(group) for name, group in sorted(by_kind.items())},
            "recoveries": len(self.injected) - len(self._open),
            "recovery_s": _spread(self.injected),
            "ps_recovery_s": _spread(by_kind.get("ps_kill", ())),
            "recovery_s_by_kind": {name: _spread(group) for name, group in sorted(by_kind.items())},
        }


def _spread(injected: Iterable[InjectedFault]) -> dict[str, float | None]:
    recoveries_s = [entry.recovery_s for entry in injected if entry.recovery_s is not None]
    return {
        "p50": round(statistics.median(recoveries_s), 3) if recoveries_s else None,
        "max": round(max(recoveries_s), 3) if recoveries_s else None,
    }
