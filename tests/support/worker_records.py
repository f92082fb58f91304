"""Records and outcomes for tests of a worker's protocol."""

from __future__ import annotations

from typing import Any

import record_builders
from doll.consumers.protocol.worker_core import (
    Batch,
    ComputedBatch,
    GradientDone,
    Send,
    WorkerAction,
)
from doll.records.control import (
    Grant,
    Push,
    Welcome,
)
from record_builders import announce

COMPUTED = ComputedBatch(4, 12.0, {"accuracy": 4.0}, (101,), 2, 0.1, shared_loss=0.7)


DONE = GradientDone("doll:j:g:3:1", 9, (COMPUTED,), 0.2, 0.3)


def welcome(**changes: Any) -> Welcome:
    """Worker 1 of session 7, from offset 100 on, with 5 batches in the durable model."""
    values: dict[str, Any] = {"term": 3, "session": 7, "origin": 100, "next_batch": 5, "fingerprint": "f"}
    return record_builders.welcome(1, **{**values, **changes})


def grant(first: int, *numbers: int, **changes: Any) -> Grant:
    """A grant for the worker of `welcome`, at version 9: of one batch for each number; default: of one, numbered 1."""
    values: dict[str, Any] = {
        "term": 3, "worker": 1, "session": 7, "first": first, "grant_ids": numbers or (1,), "version": 9,
        "min_version": 9, "key": "doll:unit:w:3:9",
    }  # fmt: skip
    return record_builders.grant_of(**{**values, **changes})


def batch(number: int, **changes: Any) -> Batch:
    return Batch(
        **{
            "number": number,
            "data": f"data {number}",
            "num_samples": 8,
            "complete_at_s": 10.0,
            "partition": 1,
            **changes,
        }
    )


def announced(first: int, until: int) -> list[WorkerAction]:
    return [Send(announce(1, 7, first, until))]


def pushed(actions: list[WorkerAction]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Key and (batch, grant) of every push."""
    records = [action.record for action in actions if isinstance(action, Send) and isinstance(action.record, Push)]
    return [(push.key, [(item.batch, item.grant_id) for item in push.batches]) for push in records]


def done(key: str, *samples: int, version: int = 9) -> GradientDone:
    return GradientDone(key, version, tuple(map(ComputedBatch, samples)))


def batches(*numbers: int) -> tuple[Batch, ...]:
    return tuple(map(batch, numbers))
