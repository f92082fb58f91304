"""The maximum sizes of the control records of a large job, and a limit for the size of the server's status. Pure.

By default, brokers accept records of up to 1 MB, measured as they are sent: control records are compressed
(`doll.kafka.publisher`). A standby takes over if no status arrives. So the status must not become so large that Kafka
refuses it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from doll.records.control import ServerStatus, WorkerStatus, encode

COMPRESSED: Final = 2
"""The minimum factor by which compression shortens long records (tests/integration/test_record_sizes.py)."""
STATUS_LIMIT_BYTES: Final = 1_800_000  # before compression
_MOST_REASONS: Final = 500  # reasons of up to 200 characters, which may compress badly
_STATUS_BYTES: Final = 256  # size of a worker without its `waiting_for`
_ESSENTIAL_BYTES: Final = 128  # size of a worker with only the fields `_DECIDED_BY`
_MEMBER_BYTES: Final = 416  # size of a batch in an update, with few dead letters
_NAMED_IN_MEMBER: Final = 64  # a batch of so many records fits `_MEMBER_BYTES`, whichever of them are refused
_SURE_BYTES: Final = 1_200  # more than a worker needs with a `waiting_for` of 200 characters
# Fields that other processes use for decisions: whether the worker is live, process, machine, last record.
_DECIDED_BY: Final = ("worker", "is_live", "session", "incarnation", "silent_s", "market", "is_spare")


def fitted(status: ServerStatus, limit_bytes: int = STATUS_LIMIT_BYTES) -> ServerStatus:
    """Return the status if it has at most `limit_bytes`; otherwise return it with less information about each worker.

    First, each text in `waiting_for` is kept only for the first worker that has it (for the other workers, the text is
    "as worker 3"), and only the first 500 texts are kept. If the status is still too large, only the fields that other
    processes use for decisions are kept; the fields that are shown to people are dropped.
    """
    if len(status.workers) * _SURE_BYTES < limit_bytes:  # surely within the limit
        return status
    status = msgspec.structs.replace(status, workers=_said_once(status.workers))
    if len(encode(status)) <= limit_bytes:
        return status
    essential = ({name: getattr(worker, name) for name in _DECIDED_BY} for worker in status.workers)
    return msgspec.structs.replace(status, workers=tuple(WorkerStatus(**fields) for fields in essential))


def _said_once(workers: tuple[WorkerStatus, ...]) -> tuple[WorkerStatus, ...]:
    first: dict[str, int] = {}
    said = []
    for worker in workers:
        text = worker.waiting_for
        at = first.setdefault(text, worker.worker) if text else worker.worker
        if at != worker.worker:
            text = f"as worker {at}"
        elif text and len(first) > _MOST_REASONS:
            text = "see its log"
        said.append(worker if text == worker.waiting_for else msgspec.structs.replace(worker, waiting_for=text))
    return tuple(said)


def status_bytes(workers: int) -> int:
    """Return the maximum size of the status of a job with `workers` workers, in bytes before compression."""
    return min(_STATUS_BYTES * workers, max(STATUS_LIMIT_BYTES, _ESSENTIAL_BYTES * workers))


def update_bytes(batches: int, records_per_batch: int = 0) -> int:
    """Return the maximum size of an update, in bytes before compression, even if every second record is refused or
    missing."""
    names = COMPRESSED * 2 * (records_per_batch + 7) // 8 if records_per_batch > _NAMED_IN_MEMBER else 0
    return (_MEMBER_BYTES + names) * batches
