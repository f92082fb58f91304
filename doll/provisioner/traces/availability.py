"""The up times of preemptible machines: the paper's two-state Markov chains, or a recorded number of machines. Pure.

A worker with k machines is up while all of its machines are up. If machines come and go one by one, the worker's up
time is the intersection of the up times of its machines (`all_up`). A recording counts machines of one kind, and n
machines make ⌊n/k⌋ workers (`pool_of_workers`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from doll.errors import ConfigError
from doll.provisioner.planning.state import Bools
from doll.provisioner.traces.model import Floats, Pool, Series


class Preemption(Protocol):
    """The up and down times of preemptible slots."""

    def spans(self, slot: int) -> Iterator[tuple[bool, float]]:
        """Return endless spans (up, seconds) of this slot from time 0 on. Consecutive spans may have the same value of
        `up`."""


class Markov:
    """Independent two-state chains. Each chain is up for the share `alpha` of the time; the mean cycle is `cycle_s`.

    The paper samples its chain every 2 s; this class is the limit of the paper's chain in continuous time.
    """

    def __init__(self, alpha: float, cycle_s: float, rng: np.random.Generator) -> None:
        """Create the chains. Raises ConfigError if alpha is not in (0, 1] or the cycle is not above 0."""
        if not 0 < alpha <= 1 or cycle_s <= 0:
            raise ConfigError(
                f"expected an availability alpha in (0, 1] and a cycle above 0 s, got {alpha} and {cycle_s}"
            )
        self.alpha, self.cycle_s = alpha, cycle_s
        self._rng = rng

    def spans(self, slot: int) -> Iterator[tuple[bool, float]]:
        if self.alpha == 1.0:
            while True:
                yield True, float("inf")
        mean_s = {True: self.alpha * self.cycle_s, False: (1.0 - self.alpha) * self.cycle_s}
        up = bool(self._rng.random() < self.alpha)  # stationary from the start
        while True:
            yield up, float(self._rng.exponential(mean_s[up]))
            up = not up


def all_up(machines: Sequence[Iterator[tuple[bool, float]]]) -> Iterator[tuple[bool, float]]:
    """Return the spans (up, seconds) of a worker that is up while all of these machines are up; see `Preemption.spans`.

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


def pool_of_workers(pool: Pool, machines_per_worker: int, num_workers: int) -> Pool:
    """Return the pool counted in workers of k machines; prices remain prices of one machine.

    If the recording has fewer machines than the workers need, each recorded machine represents several. All machines of
    a worker then belong to one recorded machine, so the pool is returned unchanged.
    """
    if machines_per_worker == 1 or pool.num_machines < num_workers * machines_per_worker:
        return pool
    num_up = Series(pool.num_up.times_s, np.floor(pool.num_up.values / machines_per_worker))
    return replace(pool, num_machines=pool.num_machines // machines_per_worker, num_up=num_up)


def slots_up(pool: Pool, times_s: Floats, num_slots: int, rng: np.random.Generator) -> Bools:
    """Return the slots that have a spot machine at these times, shape (len(times_s), num_slots).

    The share of slots that are up is the recorded share of machines that are up. If the share falls, slots that have a
    machine are drawn at random and lose it. If the share rises, slots without a machine are drawn and get one. Slots
    are drawn at random because a recording only counts machines, and no slot must have an advantage over the others.
    """
    wanted = np.rint(pool.num_up.at(times_s) * (num_slots / pool.num_machines)).astype(int)
    up = np.zeros((len(times_s), num_slots), dtype=np.bool_)
    now = np.zeros(num_slots, dtype=np.bool_)
    have = 0
    for tick, want in enumerate(wanted.tolist()):
        if want != have:
            changing = np.flatnonzero(now if want < have else ~now)
            now = now.copy()
            now[rng.choice(changing, abs(want - have), replace=False)] = want > have
            have = want
        up[tick] = now
    return up
