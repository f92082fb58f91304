"""Where the batches of one partition stand. Pure.

Batch j of a partition covers offsets [origin + j r, origin + (j + 1) r) for r records per batch. Batches are granted,
received and applied in order, so four counters say where each of them stands:

    [0, applied)           in the model
    [applied, received)    gradient held
    [received, granted)    being computed
    [granted, announced)   waiting

The applied batches of a partition are always a prefix of it, so `applied` in a checkpoint says which records the model
of that checkpoint holds; `durable` is `applied` of the newest checkpoint. Which worker serves a partition is in
`doll.ps.engine.assignment`, and its queue of batches in `doll.ps.engine.batch_queue`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from doll.records.control import Skip


@dataclass(slots=True, eq=False)
class Partition:
    """Counters of one partition; `BatchQueue` of the worker that serves it changes them.

    Attributes:
        origin: offset at which the job began.
        applied: batches in the model; at first all of them are durable.
        leader_epoch: of the last applied batch, see `doll.records.control.PushedBatch`; -1: not known.
        held: batches whose gradient is at the server.
        computing: batches granted whose gradient has not come.
    """

    number: int
    origin: int
    applied: int
    leader_epoch: int = -1
    durable: int = field(init=False)
    announced: int = field(init=False)
    held: int = 0
    computing: int = 0

    def __post_init__(self) -> None:
        self.durable = self.announced = self.applied

    @property
    def received(self) -> int:
        return self.applied + self.held

    @property
    def granted(self) -> int:
        return self.applied + self.held + self.computing

    @property
    def unsaved(self) -> int:
        """Batches in the model that no checkpoint holds yet."""
        return self.applied - self.durable

    def offsets(self, batch: int, records_per_batch: int) -> tuple[int, int]:
        """[lo, hi) of a batch."""
        lo = self.origin + batch * records_per_batch
        return lo, lo + records_per_batch

    def is_covered(self, skip: Skip, records_per_batch: int) -> bool:
        """Whether what `skip` says of its offsets covers each of them once."""
        at, end = (self.origin + batch * records_per_batch for batch in (skip.first, skip.until))
        for lo, hi in sorted([*skip.gaps, *skip.lost]):
            if lo != at or hi <= lo:
                return False
            at = hi
        return at == end

    def check_invariants(self) -> None:
        """Assert what must hold after every event; for tests."""
        assert self.durable <= self.applied
        assert self.held >= 0
        assert self.computing >= 0
        assert self.granted <= self.announced


def behind(spans: Sequence[tuple[int, int]], offset: int) -> tuple[tuple[int, int], ...]:
    """What of these ranges of offsets is not below `offset`."""
    return tuple((max(lo, offset), hi) for lo, hi in spans if hi > offset)
