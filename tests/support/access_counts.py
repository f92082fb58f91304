"""How many workers and partitions an engine and its policy look at for one event."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.engine import Driver
from doll.config.policy import PolicyConfig
from doll.ps.engine.engine import Engine


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
    engine._workers = engine._members._workers = CountingList(engine._workers)
    engine._owners = engine._grants._owners = CountingList(engine._owners)
    engine._durability._partitions = CountingList(engine._durability._partitions)
    CountingList.reads = 0


def reads_per_event(policy: PolicyConfig, num_workers: int, rounds: int, num_partitions: int | None = None) -> float:
    driver = Driver(policy, num_workers, num_partitions=num_partitions)
    count_reads(driver.engine)
    before = driver.num_events
    for _ in range(rounds):
        driver.round()
    return CountingList.reads / (driver.num_events - before)
