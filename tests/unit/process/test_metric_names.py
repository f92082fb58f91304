"""Sources of metrics name their role, and a worker's its slot."""

from __future__ import annotations

import pytest
from doll.process.metric_names import PRODUCER, worker_of, worker_source


@pytest.mark.parametrize("worker", [0, 7, 123_456])
def test_a_worker_is_read_back_from_its_source(worker: int) -> None:
    assert worker_of(worker_source(worker)) == worker


@pytest.mark.parametrize(
    "source", [PRODUCER, "worker", "worker-", "worker-x", "worker--1", "worker-²", "worker-" + "9" * 5000]
)
def test_other_sources_are_no_workers(source: str) -> None:
    assert worker_of(source) is None
