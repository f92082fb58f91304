"""Pushes as a test writes them: of one batch, or the answer to a grant."""

from __future__ import annotations

from typing import Any

from doll.ps.engine.events import AppliedBatch, AppliedSet
from doll.records.control import Grant, Push, PushedBatch


def push_of(
    *, worker: int, session: int, term: int, version: int, batch: int, grant_id: int, key: str, **more: Any
) -> Push:
    """The push of one batch; `more` are further fields of a `PushedBatch`."""
    values = {"n_samples": 0, "loss_sum": 0.0} | more
    pushed = PushedBatch(batch=batch, grant_id=grant_id, **values)
    return Push(worker=worker, session=session, term=term, version=version, key=key, batches=(pushed,))


def answer(grant: Grant, term: int, key: str, **more: Any) -> Push:
    """The push of all batches of `grant`; `more` are further fields of each `PushedBatch`."""
    values = {"n_samples": 0, "loss_sum": 0.0} | more
    batches = tuple(
        PushedBatch(batch=batch, grant_id=number, **values) for batch, number in enumerate(grant.grant_ids, grant.first)
    )
    return Push(worker=grant.worker, session=grant.session, term=term, version=grant.version, key=key, batches=batches)


def applied_set(push: Push) -> AppliedSet:
    """The batches of `push` in an update, four records each."""
    return AppliedSet(
        push,
        0.0,
        tuple(
            AppliedBatch(push.worker, item.batch, 4 * item.batch, 4 * item.batch + 4, 0.0, item)
            for item in push.batches
        ),
    )
