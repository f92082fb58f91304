"""Up times of a simulation's slots: a recorded number of machines, or several independent machines for each slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
from doll.errors import ConfigError
from doll.provisioner.traces.availability import Preemption, all_up
from doll.provisioner.traces.model import Pool


class RecordedAvailability:
    """Slots that follow a recorded number of machines: the slot of rank r is up while more than r machines of the pool
    are up.

    If the recorded pool has fewer machines than there are slots, each machine represents several slots (a recording of
    one machine moves all slots together). The recording repeats after its end.
    """

    def __init__(self, times_s: Sequence[float], num_up: Sequence[float], pool_size: int, num_slots: int) -> None:
        """Store the recording. Each count in `num_up` is valid from its time to the next time. Times ascend, and the
        last time ends the recording. `pool_size` is the number of machines that were requested."""
        if len(times_s) != len(num_up) or len(times_s) < 2 or pool_size < 1:
            raise ConfigError(f"expected two or more times with counts and a pool, got {len(times_s)} and {pool_size}")
        self._spans_s = np.diff(np.asarray(times_s, float)).tolist()
        self._num_up = list(num_up)
        self._share = pool_size / max(num_slots, 1)

    @classmethod
    def from_pool(cls, pool: Pool, num_slots: int) -> Self:
        """Return the recorded availability of a pool, from the start of its recordings."""
        inside = (pool.num_up.times_s >= pool.start_s) & (pool.num_up.times_s <= pool.end_s)
        times_s = pool.num_up.times_s[inside] - pool.start_s
        return cls(times_s.tolist(), pool.num_up.values[inside].tolist(), pool.num_machines, num_slots)

    def spans(self, slot: int) -> Iterator[tuple[bool, float]]:
        rank = int(slot * self._share) if self._share < 1 else slot
        while True:
            for seconds, up in zip(self._spans_s, self._num_up, strict=False):
                if seconds > 0:
                    yield up > rank, seconds


class WholeWorkers:
    """A `Preemption` of slots with k machines each, which come and go independently. The machines of slot n have the
    numbers k * n to k * n + k - 1."""

    def __init__(self, machine: Preemption, machines_per_worker: int) -> None:
        self._machine = machine
        self._count = machines_per_worker

    def spans(self, slot: int) -> Iterator[tuple[bool, float]]:
        first = slot * self._count
        return all_up([self._machine.spans(number) for number in range(first, first + self._count)])
