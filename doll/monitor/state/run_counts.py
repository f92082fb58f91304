"""The counts of the newest checkpoint of a job by partition, from the job's records, for `doll lineage`. Pure.

An update counts when it is in a checkpoint, because a server that resumes makes all later ones void. A rollback may
also make updates void that were in one. Then the records must be read again from the first one: the counts of the
updates that it keeps are not stored.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from doll.ledger.lineage import UpdatesRecord
from doll.ledger.offset_ranges import Span, union
from doll.records.control import Member, TermStarted, Update

_MAX_UNSAVED: Final = 100_000  # updates: no server leaves so many without a checkpoint


@dataclass(slots=True)
class PartitionCounts:
    """The counts of one partition.

    Attributes:
        applied: ranges [lo, hi) of the offsets of all batches in the model.
        samples: number of samples that were learned.
        dead_letters, held_out, lost: number of records in these ranges that were refused, that are never learned
            (`evaluation.holdout`), and that were deleted before they were read.
    """

    applied: list[Span] = field(default_factory=list)
    samples: int = 0
    dead_letters: int = 0
    held_out: int = 0
    lost: int = 0

    def add(self, member: Member) -> None:
        if self.applied and self.applied[-1][1] == member.lo:
            self.applied[-1] = (self.applied[-1][0], member.hi)
        else:
            self.applied = union([*self.applied, (member.lo, member.hi)])
        self.samples += member.n_samples
        self.dead_letters += len(member.dead)
        self.held_out += len(member.held_out)
        self.lost += sum(hi - lo for lo, hi in member.lost)


class RunCounts:
    """The counts of one generation.

    Attributes:
        version: the version of its newest checkpoint.
        partitions: what this version has learned, by partition.
    """

    def __init__(self) -> None:
        self._kept: dict[int, int] = {}  # by term: the last version of earlier servers that its server has kept
        self._saved: dict[int, int] = {}  # by term: the newest version that is known to be in a checkpoint
        self.begin()

    def begin(self) -> None:
        """Forget the counts, for the first record of the topic or of a generation."""
        self.version = 0
        self.partitions: dict[int, PartitionCounts] = {}
        self._unsaved: deque[tuple[int, tuple[Member, ...]]] = deque()
        self._counted = 0  # the last version whose update is counted
        self._term = 0
        self._limit = math.inf  # later versions of this term are void, as is known from an earlier reading

    @property
    def samples(self) -> int:
        """The number of samples of all partitions."""
        return sum(counts.samples for counts in self.partitions.values())

    def saved(self, term: int, version: int) -> None:
        """Note that the server of `term` has a checkpoint of `version`. It may be called before the updates come."""
        self._saved[term] = max(version, self._saved.get(term, 0))
        self._count(self._saved.get(self._term, 0))

    def feed(self, record: UpdatesRecord) -> bool:
        """Add the next record of the generation that is not fenced. Return False if a counted update has become void:
        then call `begin`, and feed all records again."""
        match record:
            case TermStarted():
                kept = self._kept[record.term] = record.kept_version
                self._term = record.term
                self._limit = min((to for term, to in self._kept.items() if term > record.term), default=math.inf)
                while self._unsaved and self._unsaved[-1][0] > kept:
                    self._unsaved.pop()
                if self._counted > kept:
                    return False
                self._count(kept)
                self.version = record.resumed_version
                self._count(self._saved.get(record.term, 0))
            case Update() if record.version <= self._limit:
                self._unsaved.append((record.version, record.members))
                self._count(self._saved.get(self._term, 0))
                if len(self._unsaved) > _MAX_UNSAVED:
                    self._count(self._unsaved[0][0])
        return True

    def _count(self, until: int) -> None:
        while self._unsaved and self._unsaved[0][0] <= until:
            self._counted, members = self._unsaved.popleft()
            self.version = self._counted
            for member in members:
                self.partitions.setdefault(member.partition, PartitionCounts()).add(member)
