"""What a preemption during an update costs, where the update is discarded."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.paper.replacement import discarding
from benchmarks.paper.setting import RATE, B, K
from doll.provisioner.traces.availability import Markov

WORKERS, SECONDS = 32, 400.0
FORMULA = SECONDS * WORKERS * RATE / (K * B)


def updates(*, spot: int, cycle_s: float, compute_s: float, alpha: float = 0.9) -> int:
    slots = [slot < spot for slot in range(WORKERS)]
    preemption = Markov(alpha, cycle_s, np.random.default_rng(1))
    return discarding(slots, preemption, SECONDS, compute_s, np.random.default_rng(2))


def test_without_preemption_it_is_the_formulas_count() -> None:
    assert updates(spot=0, cycle_s=1000.0, compute_s=0.02) == pytest.approx(FORMULA, rel=0.02)


def test_workers_that_are_down_make_no_batches() -> None:
    """Half of the workers are up half of the time: three quarters of the updates."""
    assert updates(spot=16, cycle_s=20.0, compute_s=0.0, alpha=0.5) == pytest.approx(0.75 * FORMULA, rel=0.06)


def test_the_longer_updates_take_the_more_are_discarded() -> None:
    counts = [updates(spot=WORKERS, cycle_s=20.0, compute_s=compute_s) for compute_s in (0.0, 0.05, 0.2)]
    assert counts[0] == pytest.approx(0.9 * FORMULA, rel=0.05)
    assert counts[0] > 1.1 * counts[1] > 1.2 * counts[2]
