"""The picture of pipelines: a bar for each task where it was, and what each stage keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from doll_lab.pipelines.plots import draw_timelines, save_timelines
from doll_lab.pipelines.schedule import StageTimes, simulate
from doll_lab.pipelines.timeline import Steps, Timeline

UNIT = [StageTimes(1.0, 1.0)] * 3


def bars(axes: Any) -> list[list[tuple[float, float]]]:
    """(begin, end) of the bars of each row."""
    rows = []
    for collection in axes.collections:
        corners = [path.get_extents() for path in collection.get_paths()]
        rows.append([(float(box.x0), float(box.x1)) for box in corners])
    return rows


def heights(line: Any) -> list[float]:
    return [float(value) for value in line.get_ydata()]


def steps_of(timeline: Timeline, size: float) -> list[Steps]:
    return [
        timeline.memory_steps(stage, parameter_bytes=size, activation_bytes=size, optimizer_multiplier=1.0)
        for stage in range(timeline.num_stages)
    ]


def test_each_task_is_a_bar_and_both_charts_have_one_scale() -> None:
    fast, slow = simulate(UNIT, 2, 6), simulate([StageTimes(2.0, 2.0)] * 3, 2, 6)
    figure = Figure()
    draw_timelines(figure, {"simulated": fast, "measured": slow})
    first, second, kept, _ = figure.axes
    for axes, timeline in ((first, fast), (second, slow)):
        assert bars(axes) == [[(span.start_s, span.end_s) for span in timeline.of_stage(q)] for q in range(3)]
    assert tuple(axes.get_title(loc="left") for axes in (first, second)) == ("simulated", "measured")
    assert first.get_xlim() == second.get_xlim() == (0.0, slow.end_s)
    labels = [text.get_text() for text in first.texts if text.get_position()[1] == 0]
    assert labels == ["1", "2", "1", "3", "2", "4", "3", "5", "4", "6", "5", "6"]
    assert kept.get_ylabel() == "minibatches in flight"
    assert [max(heights(line)) for line in kept.lines] == [fast.max_in_flight(stage) for stage in range(3)]


def test_only_a_part_of_a_run_can_be_shown() -> None:
    timeline = simulate(UNIT, 2, 200)
    figure = Figure()
    draw_timelines(figure, {"": timeline}, end_s=10.0)
    shown = bars(figure.axes[0])[0]
    assert 5 <= len(shown) <= 12
    assert all(begin < 10.0 for begin, _ in shown)


@pytest.mark.parametrize(("size", "unit", "most"), [(2.0**30, "memory, GiB", 6.0), (2.0**20, "memory, MiB", 6.0)])
def test_memory_has_a_fitting_unit(size: float, unit: str, most: float) -> None:
    timeline = simulate(UNIT, 2, 6)
    figure = Figure()
    draw_timelines(figure, {"": timeline}, memory={"": steps_of(timeline, size)})
    axes = figure.axes[1]
    assert axes.get_ylabel() == unit
    assert max(heights(axes.lines[0])) == most


def test_it_is_written_as_a_png(tmp_path: Path) -> None:
    save_timelines(tmp_path / "x.png", {"simulated": simulate(UNIT, 2, 6)})
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a timeline at least"):
        draw_timelines(Figure(), {})
