"""No event but a checkpoint makes the engine or a policy look at every worker or partition: accesses are counted, not
time."""

from __future__ import annotations

from typing import Any

import pytest
from access_counts import CountingList, count_reads, reads_per_event
from benchmarks.engine import Driver
from doll.ps.engine.events import Tick
from doll.ps.policies.base import Policy
from doll.ps.policies.doll import Doll
from doll.records.control import Leave
from engine_world import POLICIES

pytestmark = pytest.mark.slow  # loads torch

SMALL, LARGE = 8, 400


@pytest.mark.parametrize("name", POLICIES)
def test_the_cost_of_an_event_does_not_grow_with_the_number_of_workers(name: str) -> None:
    # Of `bsp` whole rounds: its update touches every worker, once for as many gradients.
    small, large = (reads_per_event(POLICIES[name], n, 2 * LARGE) for n in (SMALL, LARGE))
    assert 0 < large < 1.1 * small


@pytest.mark.parametrize("name", POLICIES)
def test_nor_with_the_number_of_partitions(name: str) -> None:
    few, many = (reads_per_event(POLICIES[name], SMALL, 2 * LARGE, partitions) for partitions in (SMALL, 1_000))
    assert 0 < many < 1.1 * few


@pytest.mark.parametrize("name", POLICIES)
def test_nor_does_the_cost_of_a_loss(name: str) -> None:
    def reads(num_workers: int) -> int:
        driver = Driver(POLICIES[name], num_workers)
        session = driver.engine.worker(1).session
        count_reads(driver.engine)
        driver.handle(Leave(worker=1, session=session, cause="spot"))
        driver.handle(Tick())
        return CountingList.reads

    assert 0 < reads(LARGE) <= reads(SMALL)


def test_a_policy_that_scans_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts above would show it."""

    def scan(self: Policy, view: Any, workers: Any) -> None:
        original(self, view, workers)  # type: ignore[arg-type]
        assert sum(view.worker(number).held for number in range(view.settings.num_workers)) >= 0

    original = Doll.changed
    monkeypatch.setattr(Doll, "changed", scan)
    small, large = (reads_per_event(POLICIES["doll"], n, 200) for n in (SMALL, LARGE))
    assert large > 10 * small
