"""When a checkpoint is due because workers hold many batches: later where it costs what they hold back."""

from __future__ import annotations

import pytest
from doll.ps.engine.batch_queue import BatchQueue
from doll.ps.engine.durability import Durability
from doll.ps.engine.membership import Worker
from doll.ps.engine.partition_state import PartitionState
from doll.records.event_times import EventSpan


@pytest.mark.parametrize(
    ("costs_rests", "may_hold", "due_at"), [(False, 32, 16), (True, 32, 24), (False, 1, 1), (True, 1, 1), (True, 2, 1)]
)
def test_is_due_before_a_worker_comes_to_a_halt(costs_rests: bool, may_hold: int, due_at: int) -> None:
    partition = PartitionState(0, 0, 0)
    worker = Worker(0, BatchQueue({0: partition}, 0), 1, "w0", 0, 0)
    durability = Durability(
        [partition], [worker], version=0, now=0.0, every_updates=1000, every_s=1000.0, max_pending_batches=may_hold,
        costs_rests=costs_rests,
    )  # fmt: skip
    for version in range(1, may_hold + 1):
        partition.applied = version
        durability.applied(worker, 1)
        assert durability.is_due(version, 1.0, final=False) == (version >= due_at)


def test_a_checkpoint_is_due_when_the_model_has_learned_much_newer_events() -> None:
    partition = PartitionState(0, 0, 0)
    worker = Worker(0, BatchQueue({0: partition}, 0), 0, "", 0, 0)
    durability = Durability(
        [partition], [worker], version=0, now=0.0, every_updates=1000, every_s=1000.0, max_pending_batches=1000,
        every_event_s=60.0,
    )  # fmt: skip

    def is_due(version: int, newest_ms: int) -> bool:
        return durability.is_due(version, 1.0, final=False, events=EventSpan(500, newest_ms, 1))

    assert not is_due(1, 500 + 59_999)
    assert is_due(1, 500 + 60_000)  # since the oldest event: no checkpoint has any
    durability.order(1, 1.0, EventSpan(500, 60_500, 1))
    assert not is_due(2, 10**9)  # one is being stored
    durability.stored(1)
    assert not is_due(2, 60_500 + 59_999)
    assert is_due(2, 60_500 + 60_000)
    assert not durability.is_due(2, 1.0, final=False)  # no event has a time
    assert not is_due(1, 10**9)  # nothing is new
