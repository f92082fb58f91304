"""No event but a checkpoint makes the engine or a policy look at every worker: accesses are counted, not time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from benchmarks.engine import Driver
from doll.config.policy import PolicyConfig
from doll.ps.engine import Engine
from doll.ps.events import Tick
from doll.ps.policies.base import Policy
from doll.ps.policies.doll import Doll
from doll.records import Leave
from engine_world import POLICIES

SMALL, LARGE = 8, 400


class CountingList(list[Any]):
    """Counts the elements that are read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        CountingList.reads += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            CountingList.reads += 1
            yield element


def count_reads(engine: Engine) -> None:
    """From now on, reads of workers and partitions count, whoever makes them."""
    workers, partitions = CountingList(engine._workers), CountingList(engine._partitions)
    engine._workers = engine._members._workers = workers
    engine._partitions = engine._durability._partitions = partitions
    CountingList.reads = 0


def reads_per_event(policy: PolicyConfig, num_workers: int, rounds: int) -> float:
    driver = Driver(policy, num_workers)
    count_reads(driver.engine)
    before = driver.num_events
    for _ in range(rounds):
        driver.round()
    return CountingList.reads / (driver.num_events - before)


@pytest.mark.parametrize("name", POLICIES)
def test_the_cost_of_an_event_does_not_grow_with_the_number_of_workers(name: str) -> None:
    # Of `bsp` whole rounds: its update touches every worker, once for as many gradients.
    small, large = (reads_per_event(POLICIES[name], n, 2 * LARGE) for n in (SMALL, LARGE))
    assert 0 < large < 1.1 * small


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
        assert sum(view.worker(number).held for number in range(len(view.origins))) >= 0

    original = Doll.changed
    monkeypatch.setattr(Doll, "changed", scan)
    small, large = (reads_per_event(POLICIES["doll"], n, 200) for n in (SMALL, LARGE))
    assert large > 10 * small
