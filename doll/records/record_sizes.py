"""How long the control records of a large job become, and the server's status kept within a bound. Pure.

Brokers take 1 MB by default, of what they are sent: control records are compressed (`doll.kafka.publisher`). A standby
elects by the status, so one that Kafka refuses looks like a server that is gone.
"""

from __future__ import annotations

from typing import Final

import msgspec

from doll.records.control import ServerStatus, WorkerStatus, encode

COMPRESSED: Final = 2
"""The least factor by which compression shortens the long records (tests/integration/test_record_sizes.py)."""
STATUS_LIMIT_BYTES: Final = 1_800_000  # before compression
_MOST_REASONS: Final = 500  # of 200 characters, which may compress badly
_STATUS_BYTES: Final = 256  # of a worker, without a text for which it waits
_ESSENTIAL_BYTES: Final = 128  # what stays of it in any case
_MEMBER_BYTES: Final = 320  # of a batch in an update, with few dead letters
_NAMED_IN_MEMBER: Final = 64  # records of which any may be refused within these bytes
_SURE_BYTES: Final = 1_200  # more than a worker takes, with a text of 200 characters for which it waits
# What others decide by: who is live, which process and machine it is, when it was last heard.
_DECIDED_BY: Final = ("worker", "is_live", "session", "incarnation", "silent_s", "market", "is_spare")


def fitted(status: ServerStatus, limit_bytes: int = STATUS_LIMIT_BYTES) -> ServerStatus:
    """A status of at most so many bytes: the same one, or with less about each worker.

    First each reason for which workers wait is said once, and then as "as worker 3", and no more than 500 reasons. If
    that is not enough, only what other processes decide by stays of each worker; what is shown to people is left out.
    """
    if len(status.workers) * _SURE_BYTES < limit_bytes:  # as much before compression as may be after it
        return status
    status = msgspec.structs.replace(status, workers=_said_once(status.workers))
    if len(encode(status)) <= limit_bytes:
        return status
    return msgspec.structs.replace(status, workers=tuple(map(_essential, status.workers)))


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


def _essential(worker: WorkerStatus) -> WorkerStatus:
    return WorkerStatus(**{name: getattr(worker, name) for name in _DECIDED_BY})


def status_bytes(workers: int) -> int:
    """The largest size of a status of so many workers, before compression."""
    return min(_STATUS_BYTES * workers, max(STATUS_LIMIT_BYTES, _ESSENTIAL_BYTES * workers))


def update_bytes(batches: int, records_per_batch: int = 0) -> int:
    """The largest size of such an update before compression, also if every other record is refused or not there."""
    names = COMPRESSED * 2 * (records_per_batch + 7) // 8 if records_per_batch > _NAMED_IN_MEMBER else 0
    return (_MEMBER_BYTES + names) * batches
