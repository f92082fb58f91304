"""A worker's protocol core that holds three batches."""

from __future__ import annotations

import pytest
from doll.consumers.protocol.worker_core import WorkerCore
from worker_records import announced, batch, welcome


@pytest.fixture
def core() -> WorkerCore:
    """Worker 1, which holds the batches 5, 6 and 7."""
    made = WorkerCore(welcome(), max_pending=4, now=0.0, market="spot")
    for number in (5, 6, 7):
        assert made.batch_ready(batch(number)) == announced(number, number + 1)
    return made
