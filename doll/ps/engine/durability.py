"""The checkpoints of a job, and the settling of held-back steps before each checkpoint. Pure.

Under a policy with a significance filter, a worker sends only a part of a batch's step and holds back the *rest*. The
batch counts as applied before the rest arrives, so the model may lack a part of the step. A checkpoint must contain
whole steps, so it is stored only while nothing is held back. To reach this state, the server lets the current round end
and starts no other round. It then asks every worker for its rest, and applies all rests in a separate update. A worker
that leaves sends its rest first. If a worker dies with its rest, the server begins again from the newest checkpoint,
which contains only whole steps (docs/decisions/0035).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from doll.ps.engine.events import AppliedSet
from doll.ps.engine.membership import Worker
from doll.ps.engine.partition_state import PartitionState
from doll.records.control import Push, Settle
from doll.records.event_times import NO_EVENTS, EventSpan

_ASK_AGAIN_S: Final = 3.0  # seconds; a request without an answer after this time may be lost


class Durability:
    """The checkpoints of one engine. At most one is being stored.

    Attributes:
        version: version of the newest stored checkpoint.
        max_unsaved: highest number of batches of one worker that are in the model and not durable.
    """

    def __init__(
        self, partitions: Sequence[PartitionState], owners: Sequence[Worker], *, version: int, now: float,
        every_updates: int, every_s: float, max_pending_batches: int, costs_rests: bool = False,
        every_event_s: float | None = None, events: EventSpan = NO_EVENTS,
    ) -> None:  # fmt: skip
        """`owners`: the worker that serves each partition. `costs_rests`: True if workers must send their rests for
        each checkpoint. Then the server stores fewer checkpoints. `events`: event times in the newest checkpoint."""
        self.version = version
        self.max_unsaved = 0
        self._partitions = partitions
        self._owners = owners
        self._unsaved: Counter[int] = Counter()  # by worker: number of batches in the model that are not durable
        self._every_updates = every_updates
        self._every_s = every_s
        self._every_event_ms = math.inf if every_event_s is None else 1000 * every_event_s
        self._saved_event_ms = events.newest_ms
        # A worker may hold more batches than this limit, so no worker waits for a checkpoint that is not due.
        self._crowded = max(1, 3 * max_pending_batches // 4 if costs_rests else max_pending_batches // 2)
        # The checkpoint that is being stored: its version, and its number of batches by partition and by worker.
        self._ordered: tuple[int, tuple[int, ...], dict[int, int]] | None = None
        self._ordered_at_s = now
        self._is_asked = self._must_keep = self._is_keeping = False

    @property
    def is_kept(self) -> bool:
        """Whether a stored checkpoint contains all decisions of the engine, including decisions that made no update."""
        return not (self._must_keep or self._is_keeping)

    def applied(self, worker: Worker, count: int) -> None:
        """Note that `count` batches of this worker have been applied."""
        self._unsaved[worker.number] += count
        self.max_unsaved = max(self.max_unsaved, self._unsaved[worker.number])

    def moved(self, giver: Worker, taker: Worker, count: int) -> None:
        """Note that a partition moves to another worker. `count`: number of its batches in the model, not durable."""
        self._unsaved[giver.number] -= count
        self._unsaved[taker.number] += count
        self.max_unsaved = max(self._unsaved.values(), default=0)

    def ask(self) -> None:
        """Request a checkpoint of the next version, so that workers send their held-back steps for it."""
        self._is_asked = True

    def keep(self) -> None:
        """Request a checkpoint, even of the same version, that contains the engine's decisions without an update."""
        self._must_keep = True

    def is_due(self, version: int, now: float, *, final: bool, events: EventSpan = NO_EVENTS) -> bool:
        """Return whether the current version `version` must be stored now. `final`: the job ends with this version.
        `events`: its event times."""
        if self._ordered is not None:
            return False
        if final or self._must_keep:
            return True
        unsaved = version - self.version
        if not unsaved:
            return False
        overdue = now - self._ordered_at_s >= self._every_s
        # Until a checkpoint has events, count from the oldest one.
        overdue |= events.newest_ms - (self._saved_event_ms or events.oldest_ms) >= self._every_event_ms
        return overdue or self._is_asked or self.max_unsaved >= self._crowded or unsaved >= self._every_updates

    def order(self, version: int, now: float, events: EventSpan = NO_EVENTS) -> None:
        """Note that a checkpoint of `version` is being stored. `events`: its event times."""
        self._saved_event_ms = events.newest_ms
        self._is_keeping = self._must_keep
        self._is_asked = self._must_keep = False
        by_worker = {worker.number: worker.queue.applied for worker in self._owners}
        self._ordered = (version, tuple(partition.applied for partition in self._partitions), by_worker)
        self._ordered_at_s = now

    def stored(self, version: int) -> dict[Worker, tuple[dict[int, int], int, dict[int, int]]] | None:
        """Note that the checkpoint of `version` is stored. Return an item for each worker that has more durable batches
        than before. The item has the durable batches of each partition whose number of durable batches has grown, the
        durable batches of the worker, and the records that cuts have left out of these partitions. Return None if the
        checkpoint was not ordered."""
        if self._ordered is None or self._ordered[0] != version:
            return None
        _, applied, by_worker = self._ordered
        self._ordered, self._is_keeping = None, False
        self.version = version
        advanced: dict[Worker, tuple[dict[int, int], int, dict[int, int]]] = {}
        # The checkpoint does not contain partitions that were added after it was ordered.
        for partition, worker, until in zip(self._partitions, self._owners, applied, strict=False):
            if (count := until - partition.durable) > 0:
                left_out = partition.became_durable(until)
                worker.queue.pending -= count
                self._unsaved[worker.number] -= count
                # A worker that got its first partition after the order has no batch in the checkpoint.
                durable = advanced.setdefault(worker, ({}, by_worker.get(worker.number, 0), {}))
                durable[0][partition.number] = until
                if left_out:
                    durable[2][partition.number] = left_out
        self.max_unsaved = max(self._unsaved.values(), default=0)
        return advanced


@dataclass(slots=True)
class _Rest:
    """A worker's rest (the held-back part of its steps) that is not in the model yet."""

    number: int
    worker: Worker
    push: Push
    received_at_s: float
    is_here: bool = False  # True if the rest is in the server's memory


class Settling:
    """The workers that hold back parts of their steps, and the rests that they have sent.

    Attributes:
        is_under_way: True while a checkpoint waits for rests. No batch is started during this time.
        rests: rests that are not in the model, by number.
    """

    def __init__(self, term: int) -> None:
        self.is_under_way = False
        self._term = term
        self._is_last = False  # True: batches that are not applied yet will never be applied
        self._unsettled: dict[int, Worker] = {}  # workers with a part of a step that is not at the server yet
        self._incomplete: dict[int, Worker] = {}  # workers with an applied batch whose step is not whole in the model
        self.rests: dict[int, _Rest] = {}
        self._asked_at_s: float | None = None
        # Higher than the numbers of all grants: a rest is never added to an update of gradients.
        self._numbers = count(1 << 62)

    @property
    def is_settled(self) -> bool:
        """Whether the model has the whole steps of all applied batches."""
        return not self._incomplete and not self.rests

    def holds_back(self, worker: Worker) -> bool:
        """Return whether a part of this worker's steps is not at the server yet."""
        return worker.number in self._unsettled

    def is_whole(self, worker: Worker) -> bool:
        """Return whether the model has everything that this worker has pushed, and the worker holds nothing back."""
        is_coming = any(rest.worker is worker for rest in self.rests.values())
        return not (is_coming or worker.number in self._unsettled or worker.number in self._incomplete)

    def received(self, worker: Worker) -> None:
        """Note that contributions of this worker have arrived."""
        if self._is_last:
            return
        queue = worker.queue
        if queue.settled >= queue.received:
            self._unsettled.pop(worker.number, None)
        else:
            self._unsettled[worker.number] = worker

    def applied(self, worker: Worker, push: Push) -> None:
        """Note that all batches of `push`, or its rest, are in the model."""
        queue = worker.queue
        if not push.batches:
            queue.whole = max(queue.whole, push.settles)
        elif not push.holds_back:
            queue.whole = queue.applied
        if queue.whole >= queue.applied:
            self._incomplete.pop(worker.number, None)
        else:
            self._incomplete[worker.number] = worker

    def is_known(self, worker: Worker, until: int) -> bool:
        """Return whether the held-back parts of this worker's batches below `until` have already arrived."""
        coming = any(rest.worker is worker and rest.push.settles >= until for rest in self.rests.values())
        return coming or until <= (worker.queue.whole if self._is_last else worker.queue.settled)

    def add(self, worker: Worker, push: Push, now: float) -> int:
        """Add a rest that was announced, and return its number. A rest without a key has nothing to fetch."""
        number = next(self._numbers)
        self.rests[number] = _Rest(number, worker, push, now)
        if not push.key:
            self.fetched(number)
        return number

    def fetched(self, number: int) -> None:
        """Note that the rest of this number is in the server's memory."""
        rest = self.rests[number]
        rest.is_here = True
        queue = rest.worker.queue
        queue.settled = max(queue.settled, rest.push.settles)
        if rest.push.settles >= (queue.applied if self._is_last else queue.received):
            self._unsettled.pop(rest.worker.number, None)

    def take(self) -> list[tuple[AppliedSet, Worker]]:
        """Return the rests with their workers if all announced and requested rests are in memory; otherwise []."""
        if (self.is_under_way and self._unsettled) or not all(rest.is_here for rest in self.rests.values()):
            return []
        rests, self.rests = self.rests, {}
        for rest in rests.values():
            self.applied(rest.worker, rest.push)
        return [(AppliedSet(rest.push, rest.received_at_s, (), rest.number), rest.worker) for rest in rests.values()]

    def ask(self, now: float) -> list[Settle]:
        """Return requests for the held-back parts. A request is repeated after `_ASK_AGAIN_S` seconds."""
        if self._asked_at_s is not None and now - self._asked_at_s < _ASK_AGAIN_S:
            return []
        self._asked_at_s = now
        return [
            Settle(term=self._term, worker=worker.number, session=worker.session, until=worker.queue.applied)
            for _, worker in sorted(self._unsettled.items())
            if worker.is_live
        ]

    def stop(self) -> None:
        """Apply only rests from now on. Contributions that are not applied yet count as held back, too."""
        self._is_last = True
        coming = {rest.worker.number for rest in self.rests.values()}
        self._unsettled = {number: worker for number, worker in self._incomplete.items() if number not in coming}

    def end(self) -> None:
        self.is_under_way, self._asked_at_s = False, None
