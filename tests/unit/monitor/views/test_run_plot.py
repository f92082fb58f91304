"""The picture of a run: what its panels show, and that it is a picture whatever there is to show."""

from __future__ import annotations

from pathlib import Path

import pytest
from doll.monitor.views.page import page
from doll.monitor.views.run_plot import draw, error_panel, progress_panel
from page_feed import MadeUpJob


@pytest.fixture
def made_up() -> MadeUpJob:
    """A job with a provisioner after a minute."""
    made_up = MadeUpJob()
    made_up.run(59)
    made_up.decide("slot 3: launch incarnation 2 on_demand (cover): i-0003")
    made_up.run(1)
    return made_up


def test_the_error_is_the_accuracy_where_there_is_one(made_up: MadeUpJob) -> None:
    panel = made_up.read(lambda state: error_panel(page(state)["curves"]))
    assert panel.y_label == "accuracy"
    before, held_out, target = panel.curves
    assert (before.label, held_out.label, target.label) == ("prequential", "held out", "target 0.97")
    assert len(held_out.y) == 60
    assert target.y.tolist() == [0.97, 0.97]
    assert before.y[-1] == pytest.approx(held_out.y[-1], abs=0.05)


def test_progress_is_compared_with_the_deadline_and_with_theory(made_up: MadeUpJob) -> None:
    learned, pace, theory = made_up.read(lambda state: progress_panel(state, page(state)["curves"])).curves
    assert learned.y[-1] == 60 * 4 * 4 * 32
    assert (pace.x.tolist(), pace.y.tolist()) == ([0.0, 300.0], [0.0, 100_000.0])
    # N λ samples per second: eight streams of 40
    assert (theory.y[1] - theory.y[0]) / (theory.x[1] - theory.x[0]) == pytest.approx(8 * 40)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 1, 60])
def test_a_run_becomes_a_picture(tmp_path: Path, seconds: int) -> None:
    made_up = MadeUpJob()
    made_up.run(seconds)
    path = tmp_path / "progress.png"
    made_up.read(lambda state: draw(state, path))
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    assert (width > 1000, height > 600) == (True, True)
    assert len(data) < 200_000
