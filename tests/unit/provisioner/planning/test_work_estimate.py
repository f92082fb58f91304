"""J(ε) from the run's own curve."""

from __future__ import annotations

from dataclasses import replace

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


CHANGE = 400  # updates; then the curve begins again


def changed_curve(until: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    at = np.arange(0, until, 5)
    since = np.where(at < CHANGE, at, at - CHANGE + 50)  # the change sets the model back to its 50th update
    return at * 128, CURVE.error(since) * np.exp(np.random.default_rng(seed).normal(0, 0.03, len(at)))


@pytest.mark.parametrize(("until", "tolerance"), [(CHANGE + 20, 0.25), (CHANGE + 250, 0.15)])
def test_after_a_change_of_the_stream_the_work_is_that_of_the_new_curve(until: int, tolerance: float) -> None:
    """Soon after the change the old curve says how far the model was set back; later the new one is known."""
    needed = CHANGE - 50 + CURVE.updates_to(0.02 + 0.01)
    of_new_curve: list[float | None] = []
    of_old_curve: list[float | None] = []
    for seed in range(5):
        at, errors = changed_curve(until, seed)
        for estimates, changed_at in ((of_new_curve, CHANGE * 128.0), (of_old_curve, 0.0)):
            rng = np.random.default_rng(0)
            planned = replace(SETTINGS, samples=CURVE.updates_to(0.03) * 128)
            estimates.append(re_estimated(planned, at, errors, 0.03, rng, changed_at=changed_at).updates)
    assert of_new_curve == pytest.approx([needed] * 5, rel=tolerance)
    error_new, error_old = (np.abs(np.array(each) / needed - 1).mean() for each in (of_new_curve, of_old_curve))
    assert error_new < error_old / 2


def test_a_target_that_was_reached_before_the_change_is_to_be_reached_again() -> None:
    at, errors = changed_curve(CHANGE + 100)
    target = float(CURVE.error(350))
    first = re_estimated(SETTINGS, at, errors, target, np.random.default_rng(0)).samples
    assert first < CHANGE * 128
    again = re_estimated(SETTINGS, at, errors, target, np.random.default_rng(0), changed_at=CHANGE * 128.0).samples
    assert again > CHANGE * 128


def test_a_change_after_the_last_evaluation_changes_nothing_yet() -> None:
    assert re_estimated(SETTINGS, *curve(250), 0.05, np.random.default_rng(0), changed_at=260 * 128.0) is SETTINGS
    few = curve(20)
    assert re_estimated(SETTINGS, *few, 0.05, np.random.default_rng(0), changed_at=10 * 128.0) is SETTINGS
