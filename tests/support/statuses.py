"""The parameter server's status as a record, with what a test does not name at its plainest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from doll.records.control import ServerStatus, WorkerStatus


def server_status(workers: Sequence[WorkerStatus] = (), **fields: Any) -> ServerStatus:
    """A status of term 1 at Unix time 0, of a server that has done nothing."""
    plain = {
        "term": 1, "time_s": 0.0, "leader_since_s": 0.0, "pid": 1, "version": 0, "durable_version": 0,
        "samples_total": 0, "batches_total": 0, "waiting_batches": 0, "computing_batches": 0, "shortfall_batches": 0,
        "stalled_s": 0.0,
    }  # fmt: skip
    return ServerStatus(workers=tuple(workers), **{**plain, **fields})


def live_worker(worker: int, **fields: Any) -> WorkerStatus:
    """A worker whose first process is live."""
    return WorkerStatus(**{"worker": worker, "is_live": True, "session": 1, **fields})


def gone_worker(worker: int, **fields: Any) -> WorkerStatus:
    """A worker whose first process has gone."""
    return WorkerStatus(**{"worker": worker, "is_live": False, "session": 1, **fields})
