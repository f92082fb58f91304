"""Checks that the updates so far apply each offset once: in each partition, each batch must begin where the batch
before it ended. Pure.

`doll audit` also reads the checkpoint, the dead letters and the log. It proves more, but its time grows with the run
time of the job. This check takes a few operations per batch, so a page can show its result while the job runs.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from doll.ledger.lineage import Lineage, LineageChange, UpdatesRecord
from doll.records.control import TermStarted, Update

_MAX_STEPS: Final = 100_000  # updates that can be undone; checkpoints are far more frequent


class Continuity:
    """Computes the check from the records of `updates`.

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
