"""Plots: what they show, computed; and a picture that opens."""

import math
from pathlib import Path

import numpy as np
import pytest
from doll.monitor.state.history import History
from doll.monitor.views.plots import draw, make_panels, moving_mean, moving_rate, staleness_panel
from doll.records.control import Member, TermStarted, Update


def run(updates: int, *, every_s: float = 0.5, metrics: bool = True) -> History:
    history = History()
    history.feed(TermStarted(term=1, resumed_version=0, origins=(0,), records_per_batch=8, time_s=0.0))
    for version in range(1, updates + 1):
        member = Member(
            worker=0, partition=0, batch=version, lo=0, hi=8, n_samples=8, base_version=version - 1, compute_s=0.02
        )
        history.feed(
            Update(
                term=1,
                version=version,
                members=(member,),
                n_samples=8,
                loss=2.0 / version,
                metrics={"accuracy": 1 - 1 / version} if metrics else {},
                samples_total=8 * version,
                time_s=1000.0 + every_s * version,
            )
        )
        if version % 10 == 0:
            measured = {"accuracy": 1 - 1 / version} if metrics else {}
            history.evaluated(time_s=1000.1 + every_s * version, term=1, version=version, loss=1.0, metrics=measured)
    return history


@pytest.mark.slow
def test_a_run_becomes_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "progress.png"
    draw(run(60), path, job="digits", predicted_rate=2.0, target_accuracy=0.95)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    assert width > 1000
    assert height > 600
    assert len(data) > 20_000


@pytest.mark.slow
@pytest.mark.parametrize("updates", [0, 1, 4])
def test_a_run_that_hardly_began_becomes_a_picture_too(tmp_path: Path, updates: int) -> None:
    path = tmp_path / "progress.png"
    draw(run(updates), path, job="digits", predicted_rate=math.nan)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_panels_show_error_over_updates_and_time_and_rates() -> None:
    panels = make_panels(run(60), predicted_rate=2.0, target_accuracy=0.95)
    assert [panel.title for panel in panels] == [
        "Loss", "Loss", "Accuracy", "Accuracy", "Updates against theory", "Update rate",
    ]  # fmt: skip
    assert [panel.x_label for panel in panels[:2]] == ["update", "seconds since the first update"]
    measured, theory = panels[-1].curves
    assert measured.y == pytest.approx(np.full(len(measured.y), 2.0))
    assert theory.y.tolist() == [2.0, 2.0]
    assert panels[2].curves[-1].label == "target 0.95"


def test_a_job_without_accuracy_has_no_accuracy_panels() -> None:
    panels = make_panels(run(60, metrics=False), predicted_rate=math.inf, target_accuracy=None)
    assert "Accuracy" not in {panel.title for panel in panels}
    assert [curve.label for curve in panels[-1].curves] == ["measured"]


def test_moving_mean_weighs_and_skips_the_unknown() -> None:
    values = np.array([1.0, math.nan, 4.0, 10.0])
    weights = np.array([1.0, 5.0, 3.0, 1.0])
    assert moving_mean(values, weights, 2).tolist() == [1.0, 1.0, 4.0, pytest.approx((12 + 10) / 4)]


def test_moving_rate_of_a_steady_run() -> None:
    _, rates = moving_rate(np.arange(100, dtype=np.float64) * 0.25)
    assert rates == pytest.approx(np.full(len(rates), 4.0))


@pytest.mark.slow
def test_the_staleness_of_a_run_is_a_panel_of_its_own(tmp_path: Path) -> None:
    panel = staleness_panel({-2: 1, 3: 3})
    (curve,) = panel.curves
    assert (curve.x.tolist(), curve.y.tolist()) == ([-2.0, 3.0], [25.0, 75.0])
    without, with_it = tmp_path / "without.png", tmp_path / "with.png"
    draw(run(60), without, job="digits", predicted_rate=2.0)
    draw(run(60), with_it, job="digits", predicted_rate=2.0, staleness={-2: 1, 3: 3})
    widths = [int.from_bytes(path.read_bytes()[16:20]) for path in (without, with_it)]
    assert widths[1] > widths[0]
