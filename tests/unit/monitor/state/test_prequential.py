"""Prequential error: means over samples, windows, and going back."""

import math
import tracemalloc

import numpy as np
import pytest
from doll.metrics.means import mean
from doll.metrics.states import to_bytes
from doll.monitor.state.prequential import Prequential


def test_means_weigh_updates_by_their_samples() -> None:
    error = Prequential(window=2)
    error.add(1, 10, 4.0, {"accuracy": 0.1})
    error.add(2, 30, 2.0, {"accuracy": 0.5})
    error.add(3, 10, 1.0, {"accuracy": 0.9})
    assert error.running().samples == 50
    assert error.running().loss == pytest.approx((40 + 60 + 10) / 50)
    assert error.windowed().samples == 40
    assert error.windowed().loss == pytest.approx((60 + 10) / 40)
    assert error.windowed().metrics["accuracy"] == pytest.approx((15 + 9) / 40)


def test_nothing_has_no_mean() -> None:
    assert math.isnan(Prequential().running().loss)
    assert Prequential().windowed().samples == 0


def test_an_update_of_dead_letters_changes_no_mean() -> None:
    error = Prequential()
    error.add(1, 8, 2.0)
    error.add(2, 0, float("nan"), {"accuracy": float("nan")})
    assert error.running() == (8, 2.0, {})


def test_a_rollback_forgets_the_versions_above() -> None:
    error, straight = Prequential(window=3), Prequential(window=3)
    for version in range(1, 8):
        error.add(version, 5, 10.0 - version, {"accuracy": version / 10})
    error.rollback(4)
    for version in range(5, 7):
        error.add(version, 5, 100.0, {"accuracy": 0.0})
    for version in range(1, 5):
        straight.add(version, 5, 10.0 - version, {"accuracy": version / 10})
    for version in range(5, 7):
        straight.add(version, 5, 100.0, {"accuracy": 0.0})
    assert error.running() == straight.running()
    assert error.windowed() == straight.windowed()


def test_a_rollback_to_the_start_forgets_all() -> None:
    error = Prequential()
    error.add(1, 5, 1.0)
    error.rollback(0)
    assert error.running().samples == 0


def test_a_metric_that_appears_later_is_averaged_over_its_own_window() -> None:
    error = Prequential(window=1)
    error.add(1, 5, 1.0)
    error.add(2, 5, 1.0, {"auc": 0.7})
    assert error.windowed().metrics == {"auc": pytest.approx(0.7)}


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="window of at least 1"):
        Prequential(window=0)


def test_a_metric_that_was_taken_back_is_gone() -> None:
    error = Prequential()
    error.add(1, 5, 1.0)
    error.add(2, 5, 1.0, {"auc": 0.7})
    error.rollback(1)
    assert error.running() == (5, 1.0, {})


def test_a_long_job_takes_few_bytes_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soak of an hour found 400 bytes an update in each process that shows the error, 45 MB in all."""
    monkeypatch.setattr("doll.monitor.state.prequential.MAX_ROLLBACK_UPDATES", 2_000)
    error = Prequential()
    tracemalloc.start()
    try:
        for version in range(1, 2_001):
            error.add(version, 8, 1.0, {"accuracy": 0.5})
        taken, _ = tracemalloc.get_traced_memory()
        assert taken < 60 * 2_000
        for version in range(2_001, 30_000):
            error.add(version, 8, 1.0, {"accuracy": 0.5})
        taken, _ = tracemalloc.get_traced_memory()
        assert taken < 120 * 2_000  # bounded
    finally:
        tracemalloc.stop()
    assert error.running() == (8 * 29_999, 1.0, {"accuracy": 0.5})
    error.rollback(29_000)
    assert error.windowed() == (8 * 50, 1.0, {"accuracy": 0.5})


def test_metrics_fade_with_each_update() -> None:
    error = Prequential()
    updates = [(1, 10, 4.0, {}), (2, 30, 2.0, {"accuracy": 0.5}), (3, 0, math.nan, {}), (4, 10, 1.0, {"accuracy": 0.9})]
    for version, samples, loss, values in updates:
        state = {"mean": to_bytes(mean(np.full(samples, loss)))} if samples else {}
        error.add(version, samples, loss, values, states=state)
    weights = [10 * 0.5 ** (3 / 2), 30 * 0.5, 0.0, 10.0]
    faded = error.faded(2.0)
    assert faded.loss == pytest.approx((4 * weights[0] + 2 * weights[1] + weights[3]) / sum(weights))
    assert faded.metrics["accuracy"] == pytest.approx((0.5 * weights[1] + 0.9 * weights[3]) / sum(weights))
    assert faded.metrics["mean"] == pytest.approx(faded.loss)
    error.add(5, 1000, 100.0)
    error.rollback(4)
    assert error.faded(2.0) == faded
    assert error.faded(1e4).loss == pytest.approx(error.running().loss, rel=1e-3)
    assert math.isnan(Prequential().faded(2.0).loss)


def test_a_loss_that_is_not_finite_does_not_fade() -> None:
    error = Prequential()
    error.add(1, 10, math.nan)
    error.add(2, 10, 1.0)
    assert math.isnan(error.faded(1.0).loss)
