"""Virtual workers in waves: what they wait for, and what their minibatches miss."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from benchmarks.paper.hetpipe_staleness import LastInFirstOut
from benchmarks.paper.virtual_workers import VirtualWorkers, lognormal_jitter
from doll.ps.policies.wsp import Wsp, WspPolicyConfig
from wave_mutants import OneWaveLooser, Ungated

from doll_lab.pipelines.schedule import Pipeline, StageTimes, simulate

UNIT = [StageTimes(1.0, 1.0)] * 4


def slower(stages: list[StageTimes], factor: float) -> list[StageTimes]:
    return [StageTimes(factor * times.forward_s, factor * times.backward_s) for times in stages]


def s_global(n: int, d: int) -> int:
    return (d + 1) * n + n - 2


def random_set(
    seed: int, n: int, d: int, make: type[Wsp] | None = None, pipeline: type[Pipeline] = Pipeline
) -> VirtualWorkers:
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, 5))
    stages = [
        slower([StageTimes(*times) for times in rng.lognormal(0.0, 0.5, (k, 2)).tolist()], float(speed))
        for speed in rng.lognormal(0.0, 0.4, int(rng.integers(2, 5)))
    ]
    policy = None if make is None else make(n, d, pipelined=True)
    system = VirtualWorkers(
        WspPolicyConfig(wave_batches=n, clock_distance=d), stages, waves=d + 8, policy=policy, pipeline=pipeline,
        jitter=lambda worker: lognormal_jitter(np.random.default_rng((seed, worker)), 0.1),
    )  # fmt: skip
    system.run()
    return system


def test_the_bound_on_missing_updates_is_reached_and_kept() -> None:
    for seed in range(60):
        n, d = seed % 5 + 1, seed % 4
        system = random_set(seed, n, d)
        assert (system.missing, system.missing_own) == (s_global(n, d), n - 1), seed
        assert system.distance <= d + 1
        assert all(times == sorted(times) for times in system.completions_s)
        assert [len(times) for times in system.completions_s] == [n * (d + 8)] * len(system.pipelines)


@pytest.mark.parametrize("make", [Ungated, OneWaveLooser])
def test_a_policy_that_admits_too_much_exceeds_the_bound(make: type[Wsp]) -> None:
    assert any(random_set(seed, 4, 0, make).missing > s_global(4, 0) for seed in range(10))


def test_minibatches_that_are_complete_out_of_order_exceed_the_bound() -> None:
    """The waves are then not what their numbers say."""
    systems = [random_set(seed, 4, 0, pipeline=LastInFirstOut) for seed in range(10)]
    assert any(system.missing > s_global(4, 0) for system in systems)
    assert any(system.missing_own > 3 for system in systems)


def test_a_virtual_worker_alone_does_what_its_pipeline_does() -> None:
    stages = [StageTimes(1.0, 2.0), StageTimes(0.7, 1.9), StageTimes(1.2, 1.1)]
    system = VirtualWorkers(WspPolicyConfig(wave_batches=3, clock_distance=0), [stages], waves=10)
    system.run()
    assert system.timeline(0) == simulate(stages, 3, 30)
    assert system.waiting_s == [0.0]


def test_equal_virtual_workers_without_jitter_do_not_wait() -> None:
    system = VirtualWorkers(WspPolicyConfig(wave_batches=4, clock_distance=0), [UNIT] * 3, waves=10)
    system.run()
    assert system.waiting_s == [0.0] * 3
    for worker in range(3):
        assert system.timeline(worker) == simulate(UNIT, 4, 40)


def test_minibatches_one_at_a_time_wait_for_the_slower_worker() -> None:
    """By hand: the fast one's minibatches take 1 s, and each but the first waits for one of 2 s."""
    stages = [[StageTimes(0.5, 0.5)], [StageTimes(1.0, 1.0)]]
    system = VirtualWorkers(WspPolicyConfig(wave_batches=1, clock_distance=0), stages, waves=10)
    system.run()
    assert system.now == 20.0
    assert system.waiting_s == [9.0, 0.0]
    assert system.idle_s == [9.0, 0.0], "a worker without a pipeline has nothing else to do"
    assert system.waiting_share == [0.45, 0.0]
    assert system.completions_s[0] == [1.0] + [2.0 * p + 1.0 for p in range(1, 10)]


def test_a_pipeline_goes_on_while_it_waits() -> None:
    run = partial(VirtualWorkers, stages=[UNIT, slower(UNIT, 1.2), UNIT], waves=20)
    waits = []
    for distance in (0, 4, 32):
        system = run(WspPolicyConfig(wave_batches=4, clock_distance=distance))
        system.run()
        assert system.distance == min(distance + 1, 4)
        assert system.waiting_s[1] == 0.0
        waits.append((system.waiting_s[0], system.idle_s[0]))
    (at_0, idle_0), (at_4, _), (at_32, _) = waits
    assert at_0 > at_4 == at_32 == 0.0
    assert idle_0 == 0.0, "the minibatches that were admitted before last longer than the wait"


def test_behind_a_much_slower_one_a_pipeline_is_idle_for_a_part_of_its_wait() -> None:
    system = VirtualWorkers(
        WspPolicyConfig(wave_batches=4, clock_distance=0), [UNIT, slower(UNIT, 2.0)], waves=50
    )  # fmt: skip
    system.run()
    assert system.waiting_share[0] == pytest.approx(0.5, abs=0.02)
    assert 0.1 < system.idle_s[0] / system.waiting_s[0] < 0.5


def test_pushes_and_pulls_take_their_time() -> None:
    """At D = 0 a virtual worker waits for both; at a larger distance for the pulls alone."""

    def waiting_s(distance: int, push_s: float, pull_s: float) -> float:
        system = VirtualWorkers(
            WspPolicyConfig(wave_batches=4, clock_distance=distance), [UNIT] * 2, waves=10, push_s=push_s, pull_s=pull_s
        )
        system.run()
        assert system.missing <= s_global(4, distance)
        return system.waiting_s[0]

    assert waiting_s(0, 0.0, 0.0) == waiting_s(2, 0.0, 0.0) == waiting_s(2, 1.5, 0.0) == 0.0
    assert waiting_s(0, 1.5, 0.0) == pytest.approx(9 * 1.5)
    assert waiting_s(0, 1.5, 0.5) == pytest.approx(9 * 2.0)
    # What is pulled holds one wave more than needed: it is good for two waves.
    assert waiting_s(2, 1.5, 0.5) == pytest.approx(4 * 0.5)
