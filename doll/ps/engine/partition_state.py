"""The state of one partition's batches. Pure.

Batches are granted, received and applied in order, so four counters give the state of each batch:

    [0, applied)           in the model
    [applied, received)    gradient held
    [received, granted)    being computed
    [granted, announced)   waiting

The applied batches of a partition are always the first ones, so `applied` in a checkpoint shows which records the model
of the checkpoint has learned. `durable` is `applied` of the newest checkpoint. The first valid announcement of a batch
decides whether the batch is cut (`doll.records.bounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from doll.records.bounds import Bounds, Cuts
from doll.records.control import BatchRange, Served, Skip


@dataclass(slots=True, eq=False)
class PartitionState:
    """The counters of one partition. The `BatchQueue` of the worker that serves the partition changes them.

    Attributes:
        origin: offset of the first batch, at which the job began.
        applied: number of batches in the model; at the start all of them are durable.
        leader_epoch: leader epoch of the last applied batch (`doll.records.control.PushedBatch`); -1: not known.
        left_out: number of records that cuts of the applied batches had left out at the start.
        cuts: cuts of the announced batches that are not durable.
        is_short: True if there was no room for some of the announced batches. The worker announces them again.
        held: number of batches whose gradient is at the server.
        computing: number of granted batches whose gradient has not arrived.
    """

    number: int
    origin: int
    applied: int
    leader_epoch: int = -1
    left_out: InitVar[int] = 0
    cuts: Cuts = field(init=False)
    durable: int = field(init=False)
    announced: int = field(init=False)
    held: int = 0
    computing: int = 0
    is_short: bool = False

    def __post_init__(self, left_out: int) -> None:
        self.cuts = Cuts(left_out)
        self.durable = self.announced = self.applied

    @property
    def received(self) -> int:
        return self.applied + self.held

    @property
    def granted(self) -> int:
        return self.applied + self.held + self.computing

    @property
    def unsaved(self) -> int:
        """The number of batches in the model that no checkpoint holds yet."""
        return self.applied - self.durable

    def bounds(self, records_per_batch: int) -> Bounds:
        """Return the offsets of the partition's batches, from the first batch that is not durable."""
        return Bounds(self.origin, records_per_batch, self.cuts)

    def offsets(self, batch: int, records_per_batch: int) -> tuple[int, int]:
        """Return the offset range [lo, hi) of a batch."""
        return self.bounds(records_per_batch).span(batch)

    def served(self, flush_until: int = 0) -> Served:
        """Return the state from which the worker reads on. After `decided`, its batches may have other cuts."""
        return Served(
            partition=self.number, origin=self.origin, next_batch=self.durable, included=self.applied,
            leader_epoch=self.leader_epoch, decided=self.received, left_out=self.cuts.before(self.durable),
            cuts=self.cuts.within(self.durable, self.received), flush_until=flush_until,
        )  # fmt: skip

    def announce(self, run: BatchRange, count: int) -> bool:
        """Add the next `count` batches with the ends in `run`; return False if announced batches have other ends."""
        begin = self.announced
        said = Cuts(run.left_out, run.cuts)
        if said.before(begin) != self.cuts.total:
            return False
        for batch, records in said.within(begin, begin + count):
            self.cuts.add(batch, records)
        self.announced += count
        return True

    def lacks_room_before(self, run: BatchRange) -> bool:
        """Return whether batches before `run` are missing because there was no room when the worker announced them."""
        return self.is_short and run.first > self.announced

    def forget_waiting(self) -> None:
        """Forget the announced batches that are not granted. They are announced again, perhaps with other cuts."""
        self.is_short = False
        self.announced = self.granted
        self.cuts.forget_from(self.announced)

    def became_durable(self, until: int) -> int:
        """Note that the batches below `until` are durable, and return how many records their cuts have left out."""
        self.durable = until
        self.cuts.forget_below(until)
        return self.cuts.before(until)

    def is_covered(self, skip: Skip, records_per_batch: int) -> bool:
        """Return whether the gaps and losses in `skip` cover each of its offsets once. None of its batches is cut."""
        left_out = self.cuts.total
        at, end = (self.origin + batch * records_per_batch - left_out for batch in (skip.first, skip.until))
        for lo, hi in sorted([*skip.gaps, *skip.lost]):
            if lo != at or hi <= lo:
                return False
            at = hi
        return at == end


def is_possible(run: BatchRange, records_per_batch: int) -> bool:
    """Return whether batches can be as `run` describes them."""
    at = run.first
    for batch, records in run.cuts:
        if not (at <= batch < run.until and 1 <= records < records_per_batch):
            return False
        at = batch + 1
    return 0 <= run.first <= run.until and run.left_out >= 0


def behind(spans: Sequence[tuple[int, int]], offset: int) -> tuple[tuple[int, int], ...]:
    """Return the parts of these offset ranges that are not below `offset`."""
    return tuple((max(lo, offset), hi) for lo, hi in spans if hi > offset)
