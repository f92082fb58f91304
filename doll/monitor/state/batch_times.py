"""The life of a batch, from its last record to the checkpoint that contains it, by the times in update records. Pure.

The parameter server's clock gives the time of the update; from there, durations lead back to the batch's beginning. So
no clock of a worker is needed, and no process of the job measures anything for this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from doll.records.control import Member, Update

_MAX_WAITING: Final = 10_000


class BatchTimes(NamedTuple):
    """A batch of an update, and its times in Unix seconds.

    Attributes:
        partition, lo, hi: its offsets [lo, hi).
        ready_s: the worker had its last record.
        begun_s: the worker began the set of batches to which it belongs, by reading weights.
        fetched_s, computed_s: the weights were there; its gradient was computed.
        pushed_s: the server got the gradient of the set.
        applied_s: the new weights were published.
        durable_s: a checkpoint contained it; None: not known.
    """

    term: int
    version: int
    base_version: int
    worker: int
    market: str
    partition: int
    lo: int
    hi: int
    samples: int
    ready_s: float
    begun_s: float
    fetched_s: float
    computing_s: float
    computed_s: float
    pushed_s: float
    applied_s: float
    durable_s: float | None = None


def times_of(update: Update) -> Iterator[BatchTimes]:
    """Yield the batches of an update that have samples. Updates of earlier releases do not have all times."""
    for _, members in groupby(update.members, lambda member: member.set_grant_id):
        yield from _of_set(update, list(members))


def _of_set(update: Update, members: Sequence[Member]) -> Iterator[BatchTimes]:
    first = members[0]
    if not first.grant_to_update_s:
        return
    pushed_s = update.time_s - first.grant_to_update_s + first.grant_to_push_s
    end_s = pushed_s - sum(member.store_s for member in members)
    fetched_s = end_s - sum(member.compute_s for member in members)
    begun_s = fetched_s - sum(member.fetch_s for member in members)
    computing_s = fetched_s
    for member in members:
        begins_s, computing_s = computing_s, computing_s + member.compute_s
        if member.n_samples:
            yield BatchTimes(
                term=update.term, version=update.version, base_version=member.base_version, worker=member.worker,
                market=member.market, partition=member.partition, lo=member.lo, hi=member.hi, samples=member.n_samples,
                ready_s=begun_s - member.wait_s, begun_s=begun_s, fetched_s=fetched_s, computing_s=begins_s,
                computed_s=computing_s, pushed_s=pushed_s, applied_s=update.time_s,
            )  # fmt: skip


class DurableBatches:
    """A sample of batches, each complete when a checkpoint contains it. A batch that no checkpoint contains, because
    its server was lost, is left out."""

    def __init__(self, max_per_s: float) -> None:
        """`max_per_s`: maximum number of batches per second, evenly over time."""
        self._gap_s = 1.0 / max_per_s
        self._next_s = 0.0
        self._waiting: deque[BatchTimes] = deque(maxlen=_MAX_WAITING)

    def add(self, update: Update) -> None:
        while self._waiting and self._waiting[-1].version >= update.version:  # a later server has made them void
            self._waiting.pop()
        for batch in times_of(update):
            if batch.applied_s >= self._next_s:
                self._next_s = max(self._next_s + self._gap_s, batch.applied_s - 1.0)
                self._waiting.append(batch)

    def durable(self, version: int, time_s: float) -> list[BatchTimes]:
        """Return the batches that are in a checkpoint since `time_s`."""
        done = []
        while self._waiting and self._waiting[0].version <= version:
            batch = self._waiting.popleft()
            done.append(batch._replace(durable_s=max(time_s, batch.applied_s)))
        return done
