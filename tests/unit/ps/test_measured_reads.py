"""The measured staleness of random runs against the definition: every read, of every other live worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from doll.consumers.intake import batching
from doll.ps.engine import measures
from doll.ps.policies.gated import GatedByClock
from doll.theory.staleness import StalenessMeter
from engine_runs import calm_steps, play, random_steps
from engine_world import POLICIES
from fuzzing import seeds
from holey_world import LEAST
from measured_world import MeasuredWorld

pytestmark = pytest.mark.slow  # loads torch

MEASURED = ("asp", "vap", "ssp", "ssp, ahead", "essp", "essp, ahead", "wsp")  # policies that allow older versions


def worlds(policy: str, workers: int, seed_range: range, monkeypatch: pytest.MonkeyPatch) -> Iterator[MeasuredWorld]:
    """Whatever happens: workers join, leave, have no batches, skip some, and servers begin again."""
    monkeypatch.setattr(batching, "MIN_RANGE", LEAST)
    monkeypatch.setattr(measures, "ALL_UP_TO", workers)
    for seed in seed_range:
        world = MeasuredWorld(POLICIES[policy], workers=workers)
        for steps in (calm_steps(seed, 1500), random_steps(seed, 1000)):
            play(world, steps)
        world.settle()
        world.check_measures()
        yield world


@pytest.mark.parametrize("policy", MEASURED)
@pytest.mark.parametrize(("workers", "seed_range"), [(3, seeds(40)), (20, seeds(10))])
def test_every_read_is_counted_against_every_other_live_worker(
    policy: str, workers: int, seed_range: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = raised = skipped = 0
    for world in worlds(policy, workers, seed_range, monkeypatch):
        reads, raised, skipped = reads + world.num_reads, raised + world.num_raised, skipped + world.skipped
    assert reads > 100
    assert skipped > 5
    if workers == 3:  # of 20, one has seldom learned anything when another joins
        assert raised > 5


@pytest.mark.parametrize(
    ("policy", "part", "method", "wrong"),
    [
        ("ssp", GatedByClock, "minimum_clock", lambda self, version: 0),
        ("wsp", GatedByClock, "minimum_clock", lambda self, version: self._clocks.minimum * self.batches_per_push),
        ("essp", GatedByClock, "take_raised", lambda self: {}),
        ("ssp", GatedByClock, "clock_offset", lambda self, worker: 0),
        ("asp", StalenessMeter, "joined", lambda self, worker, clock=None, version=0: None),
        ("asp", StalenessMeter, "skipped", lambda self, worker, batches: None),
        ("asp", StalenessMeter, "_clock_at", lambda self, worker, version: self._clocks[worker]),
    ],
)
def test_a_wrong_measure_is_found(
    policy: str, part: type, method: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, method, wrong)
    with pytest.raises(AssertionError):
        for _ in worlds(policy, 3, range(8), monkeypatch):
            pass
