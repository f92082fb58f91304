"""When the machines of a worker are all there: the spot availability of workers with several machines each. Pure.

A worker with k machines is up while all of them are. Where machines come and go one by one, that is the intersection of
their up times (`all_up`). A recording counts machines that are alike: n of them are ⌊n/k⌋ workers (`pool_of_workers`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from doll.provisioner.traces.availability import Preemption
from doll.provisioner.traces.model import Pool, Series


def all_up(machines: Sequence[Iterator[tuple[bool, float]]]) -> Iterator[tuple[bool, float]]:
    """(up, seconds) spans in which all of these machines are up, or not all of them; as of `Preemption.spans`.

    >>> from itertools import chain, repeat, islice
    >>> one, two = chain([(True, 5.0)], repeat((False, 9.0))), chain([(False, 2.0)], repeat((True, 9.0)))
    >>> list(islice(all_up([one, two]), 3))
    [(False, 2.0), (True, 3.0), (False, 6.0)]
    """
    spans = [next(machine) for machine in machines]
    while True:
        seconds = min(left_s for _, left_s in spans)
        yield all(up for up, _ in spans), seconds
        if math.isinf(seconds):
            continue
        spans = [
            (up, left_s - seconds) if left_s > seconds else next(machine)
            for (up, left_s), machine in zip(spans, machines, strict=True)
        ]


class WholeWorkers:
    """`Preemption` of slots with several machines each, which come and go independently.

    Args:
        machine: of single machines; the machines of slot n have the numbers k n to k n + k - 1.
        machines_per_worker: k.
    """

    def __init__(self, machine: Preemption, machines_per_worker: int) -> None:
        self._machine = machine
        self._count = machines_per_worker

    def spans(self, slot: int) -> Iterator[tuple[bool, float]]:
        first = slot * self._count
        return all_up([self._machine.spans(number) for number in range(first, first + self._count)])


def pool_of_workers(pool: Pool, machines_per_worker: int, num_workers: int) -> Pool:
    """The pool, counted in workers of k machines; prices stay prices of a machine.

    A recording of fewer machines than the workers have stands for several with each, so that the machines of a worker
    are among those that one of the recording stands for: it stays as it is.
    """
    if machines_per_worker == 1 or pool.num_machines < num_workers * machines_per_worker:
        return pool
    num_up = Series(pool.num_up.times_s, np.floor(pool.num_up.values / machines_per_worker))
    return dataclasses.replace(pool, num_machines=pool.num_machines // machines_per_worker, num_up=num_up)


_preemption: type[Preemption] = WholeWorkers
