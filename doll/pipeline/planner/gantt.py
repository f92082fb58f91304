"""Pictures of virtual workers: what each stage does when (a Gantt chart), and what it keeps in memory meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doll.pipeline.planner.timeline import Span, Steps, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Forward, backward and both; waves in turn are lighter and darker.
_COLORS = {"F": ("#f5d76e", "#e3a72f"), "B": ("#a8d5a2", "#59a14f"), "FB": ("#c9d787", "#9aa83e")}
_NAMES = {"F": "forward", "B": "backward", "FB": "both"}
_STAGES = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#9d755d", "#72b7b2", "#333333")
_GIB, _MIB = 2.0**30, 2.0**20
_MIN_LABEL_WIDTH = 0.011  # of the chart's width, for each character


def draw(
    figure: Figure,
    timelines: Mapping[str, Timeline],
    *,
    begin_s: float = 0.0,
    end_s: float | None = None,
    memory: Mapping[str, Sequence[Steps]] | None = None,
) -> None:
    """Charts side by side, one for each timeline: the stages' tasks, and below what each stage keeps over time.

    Args:
        figure: to draw on.
        timelines: by title, at least one.
        begin_s: first second to show.
        end_s: last second to show; default: the end of the longest timeline.
        memory: by title, bytes of each stage over time (`Timeline.memory_steps`); default: minibatches in flight.
    """
    if not timelines:
        raise ValueError("expected a timeline at least, got none")
    if end_s is None:
        end_s = max(timeline.end_s for timeline in timelines.values())
    axes = figure.subplots(2, len(timelines), squeeze=False, sharex=True, sharey="row", height_ratios=(1.5, 1.0))
    shown = {
        title: _kept(timeline, memory[title] if memory is not None else None) for title, timeline in timelines.items()
    }
    unit, name = _unit(shown, is_memory=memory is not None)
    for column, (title, timeline) in enumerate(timelines.items()):
        chart, below = axes[0][column], axes[1][column]
        _tasks(chart, timeline, begin_s, end_s)
        chart.set_title(title, fontsize=10, loc="left")
        _steps(below, shown[title], unit, end_s)
        below.set_xlabel("seconds", fontsize=9)
        below.set_xlim(begin_s, end_s)
        for each in (chart, below):
            each.tick_params(labelsize=8)
    axes[1][0].set_ylabel(name, fontsize=9)
    axes[1][0].set_ylim(bottom=0)
    axes[1][-1].legend(fontsize=7, frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1.0, 0.98))
    _legend(axes[0][-1])


def save(path: Path, timelines: Mapping[str, Timeline], **options: Any) -> None:
    """Write the picture as a PNG; `options` are the options of `draw`.

    Raises:
        OSError: it cannot be written.
    """
    from doll.process.figures import Figure, FigureCanvasAgg

    figure = Figure(figsize=(1.0 + 6.5 * len(timelines), 4.6), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    draw(figure, timelines, **options)
    figure.savefig(path, format="png")


def _kept(timeline: Timeline, memory: Sequence[Steps] | None) -> Sequence[Steps]:
    if memory is not None:
        return memory
    return [[(0.0, 0), *timeline.in_flight_steps(stage)] for stage in range(timeline.num_stages)]


def _unit(shown: Mapping[str, Sequence[Steps]], *, is_memory: bool) -> tuple[float, str]:
    """What one of the scale is, and its name."""
    if not is_memory:
        return 1.0, "minibatches in flight"
    most = max(value for stages in shown.values() for steps in stages for _, value in steps)
    return (_GIB, "memory, GiB") if most >= _GIB else (_MIB, "memory, MiB")


def _tasks(axes: Any, timeline: Timeline, begin_s: float, end_s: float) -> None:
    """One row for each stage, the last one on top as in the paper's Figure 1."""
    for stage in range(timeline.num_stages):
        spans = [span for span in timeline.of_stage(stage) if span.end_s > begin_s and span.start_s < end_s]
        axes.broken_barh(
            [(span.start_s, span.end_s - span.start_s) for span in spans], (stage - 0.4, 0.8),
            facecolors=[_COLORS[span.kind][_wave(span, timeline) % 2] for span in spans], edgecolor="white",
            linewidth=0.6,
        )  # fmt: skip
        for span in spans:
            label = str(span.minibatch)
            if span.end_s - span.start_s >= _MIN_LABEL_WIDTH * len(label) * (end_s - begin_s):
                middle = (span.start_s + span.end_s) / 2
                axes.text(middle, stage, label, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(timeline.num_stages), [f"stage {stage}" for stage in range(timeline.num_stages)])
    axes.set_ylim(-0.55, timeline.num_stages - 0.45)
    axes.tick_params(left=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _wave(span: Span, timeline: Timeline) -> int:
    return (span.minibatch - 1) // timeline.in_flight


def _steps(axes: Any, stages: Sequence[Steps], unit: float, end_s: float) -> None:
    for stage, steps in enumerate(stages):
        times = [at_s for at_s, _ in steps] + [end_s]
        values = [value / unit for _, value in steps]
        axes.step(
            times, [*values, values[-1]], where="post", linewidth=1.2, color=_STAGES[stage % len(_STAGES)],
            label=f"stage {stage}",
        )  # fmt: skip
    axes.grid(alpha=0.25)


def _legend(axes: Any) -> None:
    from doll.process.figures import Patch

    patches = [Patch(color=_COLORS[kind][1], label=name) for kind, name in _NAMES.items()]
    axes.legend(handles=patches, fontsize=7, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 0.98))
