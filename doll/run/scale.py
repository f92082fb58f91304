"""Changes the number of workers of a running job."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka.publisher import Publisher
from doll.kafka.reader import Tail
from doll.records.control import AnyRecord, Finished, Scale, ServerStatus
from doll.run.status import reachable_kafka
from doll.run.target import Target

TIMEOUT_S: Final = 60.0
_STATUS_TIMEOUT_S: Final = 10.0  # a server reports once a second
_SEND_AGAIN_S: Final = 5.0  # a server that started later may have missed the first request
_SAY_EVERY_S: Final = 5.0


@dataclass(frozen=True)
class ScaleOutcome:
    """The outcome of a change of the number of workers.

    Attributes:
        workers_before, workers: number of workers before and after the change.
        seconds: time in seconds until every partition had its worker.
        is_done: whether all partitions have moved before `timeout_s` has passed.
        is_kept: whether a checkpoint contains the number, so that a later server uses it, too.
        missing: numbers of workers to which partitions must move, but which have no process.
    """

    job: str
    workers_before: int
    workers: int
    seconds: float
    is_done: bool
    is_kept: bool
    moving_partitions: int
    missing: tuple[int, ...]

    def text(self) -> str:
        change = f"{self.job}: {self.workers_before} -> {self.workers} workers"
        if not self.is_kept:
            change += " (not in a checkpoint yet: a server that is lost now takes this number with it)"
        if self.is_done:
            return f"{change}; all partitions are served, after {self.seconds:.1f} s"
        who = ", ".join(map(str, self.missing)) or "their workers"
        return (
            f"{change}; {self.moving_partitions} partitions wait for {who}, and stay where they are until then. Start "
            "these workers: doll worker --job JOB.yaml --worker N (doll up does so by itself)"
        )


def scale(target: Target, workers: int, *, timeout_s: float, say: Callable[[str], object] = print) -> ScaleOutcome:
    """Request another number of workers from the parameter server of a job, and wait until its partitions have moved
    and a checkpoint contains the number.

    Raises:
        ConfigError: the job does not allow this number of workers, or the job does not run.
        ServiceUnavailableError: the broker or the parameter server does not answer.
    """
    target, services = reachable_kafka(target)
    config = target.config
    if not 1 <= workers <= config.data.places:
        raise ConfigError(
            f"--workers: expected 1 to {config.data.places} (data.max_workers, or data.partitions), got {workers}; "
            "to allow more, resume the job with another data.max_workers"
        )
    needed = config.training.policy.batches_per_update(workers)
    if needed > (room := workers * config.worker.max_pending_batches):
        raise ConfigError(
            f"--workers: an update is of {needed} batches, and {workers} workers hold {room} at most "
            "(worker.max_pending_batches): expected more workers"
        )
    with (
        Tail(config, services, (config.topic("updates"), config.topic("metrics"))) as tail,
        Publisher(config, services) as publisher,
    ):
        status = _status_of([entry.record for entry in tail.read_history()], None)
        began_s = time.monotonic()
        while status is None:
            if time.monotonic() - began_s > _STATUS_TIMEOUT_S:
                raise ConfigError(f"job {config.job} does not run: no parameter server reports on {services.kafka}")
            status = _status_of([entry.record for entry in tail.poll(0.5)], None)
        before, began_s = status.num_workers, time.monotonic()
        sent_s = said_s = float("-inf")
        while status.num_workers != workers or status.moving_partitions or not status.is_kept:
            now_s = time.monotonic()
            if now_s - began_s > timeout_s:
                break
            if status.num_workers != workers and now_s - sent_s > _SEND_AGAIN_S:
                sent_s = now_s
                publisher.send(config.topic("events"), Scale(workers=workers, run_id=status.run_id))
                publisher.flush(_SEND_AGAIN_S)
            if now_s - said_s > _SAY_EVERY_S and said_s > 0 and status.moving_partitions:
                say(f"{status.moving_partitions} partitions are to move; missing workers: {list(_missing(status))}")
            if now_s - said_s > _SAY_EVERY_S:
                said_s = now_s
            status = _status_of([entry.record for entry in tail.poll(0.5)], status) or status
        if status.num_workers != workers:
            raise ServiceUnavailableError(
                f"the parameter server of job {config.job} has not answered for {timeout_s:g} s: is it running?"
            )
        return ScaleOutcome(
            config.job, before, workers, time.monotonic() - began_s, not status.moving_partitions,
            status.is_kept, status.moving_partitions, _missing(status),
        )  # fmt: skip


def _missing(status: ServerStatus) -> tuple[int, ...]:
    here = {worker.worker for worker in status.workers if worker.is_live or worker.is_spare}
    return tuple(worker for worker in range(status.num_workers) if worker not in here)


def _status_of(records: Sequence[AnyRecord], status: ServerStatus | None) -> ServerStatus | None:
    """Return the newest status; None if there is none, or if the job has ended after it."""
    statuses = [record for record in records if isinstance(record, ServerStatus) and record.num_workers]
    status = max([*statuses, *filter(None, [status])], key=lambda record: record.time_s, default=None)
    ended_s = max((record.time_s for record in records if isinstance(record, Finished)), default=-math.inf)
    return None if status is None or status.time_s <= ended_s else status
