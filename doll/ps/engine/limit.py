"""The limit of a job, as the server sees it: a partition, a worker, all workers, or the updates. Pure."""

from __future__ import annotations

from statistics import median
from typing import Final, Literal

from doll.ps.engine.engine import Engine
from doll.ps.engine.membership import Worker
from doll.records.control import Limit

STANDS_S: Final = 3.0  # seconds for which the limit must be the same before it is reported
_NAMED: Final = 8  # maximum number of partitions that a limit names
_SLOW: Final = 1.5  # factor of the median time of a batch
_MOST: Final = 0.5  # share of the unread records
_BACKLOG_BATCHES: Final = 4  # per worker; fewer unread batches are normal
_BUSY: Final = 0.75  # share of the workers
_COMPUTING: Final = 0.5  # share of the workers' time


class LimitWatch:
    """Reports a limit after it has lasted for a while. Call `observe` about once a second."""

    def __init__(self) -> None:
        self._seen: tuple[str, int, tuple[int, ...]] | None = None
        self._since_s = 0.0
        self._times = (0.0, 0.0)

    def observe(self, engine: Engine, now: float, *, computing_s: float = 0.0, idle_s: float = 0.0) -> Limit | None:
        """Return the job's limit if it has been the same for `STANDS_S` seconds or longer; otherwise None.

        `computing_s`, `idle_s`: seconds of all workers since the server began (`doll.records.control.Measures`).
        """
        computed_s, waited_s = computing_s - self._times[0], idle_s - self._times[1]
        self._times = computing_s, idle_s
        item = limit_of(engine)
        if item is not None and item.kind == "workers" and computed_s < _COMPUTING * (computed_s + waited_s):
            item = Limit(kind="updates", unread=item.unread, share=computed_s / (computed_s + waited_s))
        seen = None if item is None else (item.kind, item.worker, item.partitions)
        if seen != self._seen:
            self._seen, self._since_s = seen, now
        return item if now - self._since_s >= STANDS_S else None


def limit_of(engine: Engine) -> Limit | None:
    """Return the job's limit at this moment, from counters and heartbeats; None if there is none that lasts.

    The first of these: a worker that the policy waits for, because it is dry or slow; a partition with most of the
    unread records, whose worker is busy; all workers, if most of them are busy and many records are unread."""
    live = [worker for worker in engine.workers() if worker.is_live]
    unread = sum(worker.lag for worker in live)
    for number in sorted(engine.policy.waits_for(engine)):
        worker = engine.worker(number)
        if (kind := _why(worker, live)) is not None:
            partitions = tuple(sorted(worker.queue.partitions))
            return Limit(
                kind=kind, worker=number, partitions=partitions[:_NAMED] if kind == "dry" else (),
                num_partitions=len(partitions), unread=unread,
            )  # fmt: skip
    backlog = _BACKLOG_BATCHES * engine.settings.records_per_batch
    fullest = max(live, key=_fullest_of, default=None)
    if fullest is not None and (most := _fullest_of(fullest)) >= max(backlog, _MOST * unread) and _is_busy(fullest):
        partition = max(fullest.most_unread, key=lambda item: item[1])[0]
        return Limit(
            kind="partition", worker=fullest.number, partitions=(partition,), share=most / unread, unread=unread,
            num_partitions=len(fullest.queue.partitions),
        )  # fmt: skip
    if unread >= backlog * max(1, len(live)) and sum(map(_is_busy, live)) >= _BUSY * len(live):
        return Limit(kind="workers", unread=unread)
    return None


def _why(worker: Worker, live: list[Worker]) -> Literal["dry", "slow"] | None:
    """Return the lasting reason for which the other workers wait for this worker; None if there is no such reason."""
    if not (worker.lag or worker.queue.waiting or worker.computing):
        return "dry"
    others = [other.batch_s for other in live if other is not worker and other.batch_s]
    return "slow" if others and worker.batch_s > _SLOW * median(others) else None


def _fullest_of(worker: Worker) -> int:
    """Return the largest number of unread records that one partition of the worker has."""
    return max((count for _, count in worker.most_unread), default=0)


def _is_busy(worker: Worker) -> bool:
    return worker.computing > 0 or worker.held > 0
