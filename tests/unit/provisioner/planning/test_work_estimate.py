"""J(ε) from the run's own curve."""

from __future__ import annotations

import numpy as np
import pytest
from doll.provisioner.planning.estimators import re_estimated
from doll.provisioner.planning.state import PlannerSettings
from doll.theory.fitting import Decay

SETTINGS = PlannerSettings(samples=500 * 128, group_size=4, batch_size=32, deadline_s=1000.0)
CURVE = Decay(0.99, 1.0, 0.02)
TRUE = CURVE.updates_to(0.05)


def curve(until: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Samples and errors of an evaluation every 5 updates."""
    at = np.arange(0, until, 5)
    return at * 128, CURVE.error(at) * np.exp(np.random.default_rng(seed).normal(0, 0.03, len(at)))


def test_too_early_changes_nothing() -> None:
    assert re_estimated(SETTINGS, *curve(50), 0.05, np.random.default_rng(0)) is SETTINGS
    flat = np.arange(0, 100, 5) * 128, np.full(20, 1.0)
    assert re_estimated(SETTINGS, *flat, 0.05, np.random.default_rng(0)) is SETTINGS


def test_the_estimate_comes_near_from_above() -> None:
    for seed in range(5):
        updates = re_estimated(SETTINGS, *curve(250, seed), 0.05, np.random.default_rng(0)).updates
        assert updates is not None
        assert 0.95 * TRUE <= updates <= 1.4 * TRUE


def test_reached_is_reached() -> None:
    updates = re_estimated(SETTINGS, *curve(600), 0.05, np.random.default_rng(0)).updates
    assert updates == pytest.approx(TRUE, rel=0.1)


def test_one_step_is_bounded() -> None:
    small = PlannerSettings(samples=50 * 128, group_size=4, batch_size=32, deadline_s=1000.0)
    at, errors = curve(200)
    assert re_estimated(small, at, errors, 0.05, np.random.default_rng(0)).updates == max(100, at[-1] / 128 + 1)
    # A floor above the target: work grows, step by step.
    assert re_estimated(SETTINGS, *curve(300), 0.001, np.random.default_rng(0)).updates == 1000
