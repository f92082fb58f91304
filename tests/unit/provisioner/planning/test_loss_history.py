"""The history of losses: bounded, monotone, rolled back, and the same after a restart at any point."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from doll.provisioner.planning.tuner import LossHistory
from hypothesis import given
from hypothesis import strategies as st


def test_steps_losses_and_durations() -> None:
    history = LossHistory()
    for step in range(1, 11):
        history.observe(step, 1 / step, 100.0 + 2.0 * step)
    steps, losses = history.curve(after=7)
    assert steps.tolist() == [8, 9, 10]
    assert losses.tolist() == [1 / 8, 1 / 9, 1 / 10]
    assert history.step_seconds().tolist() == [2.0] * 9
    assert len(history.step_seconds(after=4, skip=3)) == 2
    assert (history.last_step, history.first_step, history.elapsed_s) == (10, 1, 18.0)


def test_what_makes_no_sense_is_passed_over() -> None:
    history = LossHistory()
    history.observe(5, 1.0, 10.0)
    history.observe(5, 2.0, 11.0)
    history.observe(4, 2.0, 12.0)
    history.observe(6, math.nan, 13.0)
    history.observe(7, 3.0, math.inf)
    assert len(history) == 1
    history.observe(8, 1.0, 9.0)
    assert history.step_seconds().tolist() == [0.0], "a clock that goes back stands still"


def test_memory_is_bounded_and_means_are_kept() -> None:
    history = LossHistory(most=16)
    rng = np.random.default_rng(0)
    losses = rng.random(10_000)
    for step, loss in enumerate(losses.tolist(), 1):
        history.observe(step, loss, 0.5 * step)
    assert 8 <= len(history) <= 16
    steps, means = history.curve()
    stride = int(steps[1] - steps[0])
    assert means[0] == pytest.approx(losses[: int(steps[0])].mean())
    assert means[3] == pytest.approx(losses[int(steps[3]) - stride : int(steps[3])].mean())
    assert history.step_seconds() == pytest.approx(0.5)
    assert history.last_step == 10_000
    with pytest.raises(ValueError, match="expected at least 2 points"):
        LossHistory(most=1)


def test_a_roll_back_forgets_what_was_undone() -> None:
    history = LossHistory()
    for step in range(1, 11):
        history.observe(step, 1.0, float(step))
    history.cut(6)
    assert history.last_step == 6
    history.observe(7, 9.0, 20.0)
    assert history.curve()[1].tolist() == [1.0] * 6 + [9.0]
    history.clear()
    assert (len(history), history.last_step) == (0, 0.0)


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("loss"), st.integers(1, 3), st.floats(0.01, 10.0)),
            st.tuples(st.just("cut"), st.integers(0, 30), st.just(0.0)),
        ),
        max_size=80,
    ),
    restart=st.integers(0, 80),
    most=st.integers(2, 9),
)
def test_a_restart_at_any_point_changes_nothing(events: list[tuple[str, int, float]], restart: int, most: int) -> None:
    """This holds also for incomplete points; steps ascend, and there are never more points than allowed."""
    whole, resumed, step = LossHistory(most), LossHistory(most), 0
    for number, (kind, value, loss) in enumerate(events):
        if number == restart:
            kept = json.loads(json.dumps(resumed.to_dict()))
            resumed = LossHistory(most)
            resumed.restore(kept)
        for history in (whole, resumed):
            if kind == "cut":
                history.cut(max(0, step - value))
            else:
                history.observe(step + value, loss, float(number))
        step = max(0, step - value) if kind == "cut" else step + value
        assert len(whole) <= most
        assert (np.diff(whole.curve()[0]) > 0).all()
    assert whole.to_dict() == resumed.to_dict()


@pytest.mark.parametrize(
    "kept", [{}, {"stride": 0, "points": [], "open": []}, {"stride": 1, "points": [[1]], "open": []}]
)
def test_another_content_is_refused(kept: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        LossHistory().restore(kept)
