"""Merged metric states: windows, rollbacks, and limits of memory."""

from __future__ import annotations

import numpy as np
import pytest
from doll import metrics
from doll.metrics.states import to_bytes
from doll.monitor.state.metric_window import MetricWindow


def states(*values: float) -> dict[str, bytes]:
    return {"m": to_bytes(metrics.mean(np.array(values)))}


def test_windows_and_rollbacks() -> None:
    window = MetricWindow(2)
    for version, value in enumerate((1.0, 2.0, 3.0, 4.0), 1):
        window.add(version, states(value))
    assert window.running()["m"] == 2.5
    assert window.windowed()["m"] == 3.5
    window.rollback(2)
    assert window.running()["m"] == 1.5
    window.add(3, states(9.0, 9.0))
    assert window.running()["m"] == (1 + 2 + 18) / 4
    assert window.windowed()["m"] == 20 / 3
    window.rollback(0)
    assert (window.running(), window.windowed()) == ({}, {})


def test_old_states_are_merged_and_a_rollback_before_them_begins_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doll.monitor.state.metric_window._MAX_BYTES", 2_000)
    window = MetricWindow(2)
    for version in range(1, 101):
        window.add(version, states(float(version)))
    assert len(window._kept) < 10
    assert window.running()["m"] == 50.5
    window.rollback(99)
    assert window.running()["m"] == 50
    window.rollback(50)
    assert window.running() == {}
    window.add(51, states(7.0))
    assert window.running()["m"] == 7


def test_states_that_cannot_be_used_are_left_out() -> None:
    window = MetricWindow(2)
    window.add(1, states(1.0))
    window.add(2, {"m": b"?", "n": to_bytes(metrics.auc([0.1, 0.2], [0, 1]))})
    window.add(3, {"n": to_bytes(metrics.mean(np.array([5.0])))})
    assert window.running()["m"] == 1
    assert window.running()["n"] == 5, "the metric of this name is another one now"


def test_names_are_bounded() -> None:
    window = MetricWindow(2)
    window.add(1, {f"m{at}": to_bytes(metrics.mean(np.array([1.0]))) for at in range(10_000)})
    assert len([name for name in window.running() if "_" not in name]) == 256


def test_a_job_without_states_keeps_nothing() -> None:
    window = MetricWindow(2)
    window.add(1, {})
    assert not window._kept
