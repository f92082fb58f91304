"""HetPipe's scripts of convergence: wrong steps, a wrong view or a wrong sign fails a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.paper import hetpipe_fig6, hetpipe_theorem1
from benchmarks.paper.harness import Check
from benchmarks.paper.hetpipe_fig6 import Curve, LearningWorkers, drifting_jitter
from benchmarks.paper.wsp import global_staleness
from doll.ps.policies.wsp import WspPolicyConfig
from doll.theory.checks import Floats

from doll_lab.pipelines.schedule import StageTimes


def failed(checks: Sequence[Check]) -> list[str]:
    return [check.what for check in checks if not check.is_expected]


@pytest.mark.slow  # simulations
def test_steps_that_do_not_fall_fail_the_theorem() -> None:
    updates, lemma = 60_000, hetpipe_theorem1.lemma_errors()
    right = hetpipe_theorem1.simulate((4, 4, 0), updates, 0)
    constant = hetpipe_theorem1.simulate((4, 4, 0), updates, 0, constant_step=0.5)
    assert failed(hetpipe_theorem1.checks_of({(4, 4, 0): right}, constant, lemma)) == []
    wrong = failed(hetpipe_theorem1.checks_of({(4, 4, 0): constant}, right, lemma))
    assert len(wrong) == 5, "regret, share of the bound, exponent, distance, control"
    printed = failed(hetpipe_theorem1.checks_of({(4, 4, 0): right}, constant, lemma[::-1]))
    assert [what.split(":")[0] for what in printed] == ["Lemma 2, corrected sign", "Lemma 2, as printed in (5) and (8)"]


def test_weights_miss_what_they_may_and_no_more() -> None:
    """As by hand, minibatch by minibatch."""
    few = hetpipe_theorem1.simulate((2, 3, 1), 2 * 60, 0)
    s_g = 7  # (D + 1) N_m + N_m - 2
    rng = np.random.default_rng((31, 0))
    optimum = rng.normal(size=10)
    optimum *= 3.0 / np.linalg.norm(optimum)
    directions = rng.normal(size=(60, 2, 10))
    directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
    assert few.updates[-1] == 120
    eta = few.theorem.step_size(np.arange(1, 121)).reshape(60, 2)
    updates = np.zeros((60, 2, 10))
    losses = []
    for p in range(60):
        for worker in range(2):
            weights = sum((updates[q, v] for q in range(p) for v in range(2)
                           if q < p - s_g or (v == worker and q <= p - 3)), np.zeros(10))  # fmt: skip
            error = float(directions[p, worker] @ (weights - optimum))
            losses.append(abs(error))
            updates[p, worker] = -eta[p, worker] * np.sign(error) * directions[p, worker]
    assert few.regret[-1] == pytest.approx(np.mean(losses))


class Counts:
    """Updates that count themselves: a number for each virtual worker."""

    start = np.zeros(hetpipe_fig6.WORKERS)

    def __init__(self) -> None:
        self.views: list[tuple[int, int, Floats]] = []

    def gradient(self, parameters: Floats, worker: int, minibatch: int) -> Floats:
        self.views.append((worker, minibatch, parameters))
        return -np.eye(hetpipe_fig6.WORKERS)[worker]

    def loss(self, parameters: Floats) -> float:
        return 0.0


@pytest.mark.parametrize("distance", [0, 1, 4])
def test_views_hold_all_of_the_own_complete_updates_and_the_others_as_the_gate_demands(distance: int) -> None:
    counts, size = Counts(), hetpipe_fig6.IN_FLIGHT
    system = LearningWorkers(
        counts, 1.0, WspPolicyConfig(wave_batches=size, clock_distance=distance),
        stages=[[StageTimes(1.0, 1.0)] * 3] * hetpipe_fig6.WORKERS, waves=20, push_s=1.5, pull_s=1.5,
        jitter=lambda worker: drifting_jitter(np.random.default_rng((1, worker))),
    )  # fmt: skip
    system.run()
    bound = global_staleness(size, distance)
    own = [minibatch - 1 - int(view[worker]) for worker, minibatch, view in counts.views]
    assert 0 <= min(own) <= max(own) == size - 1, "s_local"
    late = [
        minibatch - 1 - int(min(np.delete(view, worker)))
        for worker, minibatch, view in counts.views
        if minibatch > (distance + 1) * size + size - 1
    ]
    assert size < max(late) <= bound
    assert len(counts.views) == 20 * size * hetpipe_fig6.WORKERS
    assert system._models[-1].tolist() == [20 * size] * hetpipe_fig6.WORKERS, "nothing is lost, nothing is added twice"


def curve(end_s: float, minibatches: float, middle: float) -> Curve:
    """Reaches the target at the end."""
    at = np.array([0.0, 800.0, minibatches])
    return Curve(np.array([0.0, end_s / 2, end_s]), at, np.array([2.0, middle, 0.5]), end_s)


def test_the_criteria_of_figure_6_can_fail() -> None:
    old = replace(curve(100.0, 2000.0, 1.0), end_s=72.0)  # later at the target, and as many minibatches per second
    good = {0: [curve(100.0, 2000.0, 0.9)], 4: [curve(70.0, 2000.0, 0.9)], 32: [old]}
    fresh = {4: [curve(70.0, 2000.0, 0.9)], 32: [curve(72.0, 2040.0, 0.9)]}
    assert failed(hetpipe_fig6.checks_of(good, fresh)) == []
    slower = good | {0: [curve(69.0, 2000.0, 0.9)]}
    assert failed(hetpipe_fig6.checks_of(slower, fresh)) == ["D = 4: time to loss 0.7, of that at D = 0"]
    better = good | {32: [replace(curve(100.0, 2000.0, 0.8), end_s=72.0)]}
    assert failed(hetpipe_fig6.checks_of(better, fresh)) == ["D = 32: loss after 800 minibatches, less that at D = 4"]
    as_in_the_paper = good | {32: [curve(73.0, 2000.0, 1.0)]}
    assert failed(hetpipe_fig6.checks_of(as_in_the_paper, fresh)) == ["D = 32: time to loss 0.7, of that at D = 4"]
    assert len(failed(hetpipe_fig6.checks_of(good, good))) == 1, "as late with the newest weights: not the cause"
    never = Curve(np.array([1.0, 2.0]), np.array([800.0, 900.0]), np.array([0.5, 0.9]), 2.0)
    assert never.to_target(0.7) == (np.inf, np.inf), "below the target once is not permanent"


@pytest.mark.slow  # simulations
def test_weights_that_come_after_each_wave_are_newer_than_those_that_the_gate_asks_for() -> None:
    """At D = 32 the gate asks for nothing for 33 waves; the wait for weights is none either way."""

    def oldest(kind: type[LearningWorkers]) -> int:
        system = kind(
            hetpipe_fig6.Perceptron(0), 0.02, WspPolicyConfig(wave_batches=4, clock_distance=32),
            stages=[[StageTimes(1.0, 1.0)] * 4] * hetpipe_fig6.WORKERS, waves=20, push_s=2.0, pull_s=2.0,
        )  # fmt: skip
        system.run()
        return min(system.process(worker).cached for worker in range(hetpipe_fig6.WORKERS))

    assert oldest(LearningWorkers) == 0
    assert oldest(hetpipe_fig6.RefreshedWorkers) > 70
