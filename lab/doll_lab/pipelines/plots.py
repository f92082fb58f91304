"""Figures of virtual workers: a profile, an allocation, and the tasks of each stage over time (a Gantt chart)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doll.pipeline.profiling.profile import Profile
from doll.process.files import refuse_unwritable

from doll_lab.pipelines.prediction import Prediction
from doll_lab.pipelines.timeline import Steps, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Forward, backward and both; waves alternate between lighter and darker.
_COLORS = {"F": ("#f5d76e", "#e3a72f"), "B": ("#a8d5a2", "#59a14f"), "FB": ("#c9d787", "#9aa83e")}
_NAMES = {"F": "forward", "B": "backward", "FB": "both"}
_STAGES = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#9d755d", "#72b7b2", "#333333")
_FORWARD, _BACKWARD, _RECEIVE, _PACE = "#e3a72f", "#59a14f", "#9d755d", "#333333"
_PARAMETERS, _ACTIVATIONS = "#4c78a8", "#b0c4de"
_GIB, _MIB = 2.0**30, 2.0**20
_MIN_LABEL_WIDTH = 0.011  # share of the chart's width for each character


def draw_timelines(
    figure: Figure,
    timelines: Mapping[str, Timeline],
    *,
    end_s: float | None = None,
    memory: Mapping[str, Sequence[Steps]] | None = None,
) -> None:
    """Draw charts side by side, one for each timeline: the stages' tasks, and below the content that each stage keeps.

    Args:
        figure: figure to draw into.
        timelines: timelines by title, at least one.
        end_s: last second to show; None: the end of the longest timeline.
        memory: bytes of each stage over time by title (`Timeline.memory_steps`); None: show minibatches in flight.
    """
    if not timelines:
        raise ValueError("expected a timeline at least, got none")
    if end_s is None:
        end_s = max(timeline.end_s for timeline in timelines.values())
    axes = figure.subplots(2, len(timelines), squeeze=False, sharex=True, sharey="row", height_ratios=(1.5, 1.0))
    if memory is None:
        unit, name = 1.0, "minibatches in flight"
        memory = {
            title: [[(0.0, 0), *timeline.in_flight_steps(stage)] for stage in range(timeline.num_stages)]
            for title, timeline in timelines.items()
        }
    else:
        unit, name = _unit(memory)
    for column, (title, timeline) in enumerate(timelines.items()):
        chart, below = axes[0][column], axes[1][column]
        _tasks(chart, timeline, end_s)
        chart.set_title(title, fontsize=10, loc="left")
        _steps(below, memory[title], unit, end_s)
        below.set_xlabel("seconds", fontsize=9)
        below.set_xlim(0.0, end_s)
        for each in (chart, below):
            each.tick_params(labelsize=8)
    axes[1][0].set_ylabel(name, fontsize=9)
    axes[1][0].set_ylim(bottom=0)
    axes[1][-1].legend(fontsize=7, frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1.0, 0.98))
    _legend(axes[0][-1])


def save_timelines(path: Path, timelines: Mapping[str, Timeline], **options: Any) -> None:
    """Write the figure as a PNG; `options` are the options of `draw_timelines`.

    Raises:
        OSError: the file cannot be written.
    """
    from doll_lab.figures import new_figure

    figure = new_figure(1.0 + 6.5 * len(timelines), 4.6)
    draw_timelines(figure, timelines, **options)
    figure.savefig(path, format="png")


def _unit(shown: Mapping[str, Sequence[Steps]]) -> tuple[float, str]:
    """Return the bytes of the unit that fits the shown values, and the name of the scale."""
    most = max(value for stages in shown.values() for steps in stages for _, value in steps)
    return (_GIB, "memory, GiB") if most >= _GIB else (_MIB, "memory, MiB")


def _tasks(axes: Any, timeline: Timeline, end_s: float) -> None:
    """Draw one row for each stage; the last stage is on top, as in the paper's Figure 1."""
    for stage in range(timeline.num_stages):
        spans = [span for span in timeline.of_stage(stage) if span.start_s < end_s]
        axes.broken_barh(
            [(span.start_s, span.end_s - span.start_s) for span in spans], (stage - 0.4, 0.8),
            facecolors=[_COLORS[span.kind][(span.minibatch - 1) // timeline.in_flight % 2] for span in spans],
            edgecolor="white", linewidth=0.6,
        )  # fmt: skip
        for span in spans:
            label = str(span.minibatch)
            if span.end_s - span.start_s >= _MIN_LABEL_WIDTH * len(label) * end_s:
                middle = (span.start_s + span.end_s) / 2
                axes.text(middle, stage, label, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(timeline.num_stages), [f"stage {stage}" for stage in range(timeline.num_stages)])
    axes.set_ylim(-0.55, timeline.num_stages - 0.45)
    axes.tick_params(left=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


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
    from doll_lab.figures import Patch

    patches = [Patch(color=_COLORS[kind][1], label=name) for kind, name in _NAMES.items()]
    axes.legend(handles=patches, fontsize=7, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 0.98))


def save_allocation(prediction: Prediction, model: str, path: Path) -> None:
    """Write a figure of an allocation as a PNG: the time of each stage of each virtual worker.

    Raises:
        ConfigError: the file cannot be written.
    """
    from doll_lab.figures import new_figure

    stages = [stage for worker in prediction.workers for stage in worker.partition.stages]
    figure = new_figure(max(6.0, 1.5 + 0.45 * len(stages)), 4.5)
    axes = figure.add_subplot()
    at, labels, places = 0.0, [], []
    for number, worker in enumerate(prediction.workers, 1):
        first = at
        for stage in worker.partition.stages:
            bottom = 0.0
            for seconds, color in (
                (stage.forward_s, _FORWARD), (stage.backward_s, _BACKWARD),
                (stage.receive_forward_s + stage.receive_backward_s, _RECEIVE),
            ):  # fmt: skip
                axes.bar(at, seconds, 0.8, bottom, color=color)
                bottom += seconds
            places.append(at)
            labels.append(stage.device.name)
            at += 1.0
        axes.text((first + at - 1.0) / 2, 1.01, f"worker {number}", transform=axes.get_xaxis_transform(), ha="center",
                  fontsize=8)  # fmt: skip
        at += 0.6
    for label, color in (("forward", _FORWARD), ("backward", _BACKWARD), ("receive", _RECEIVE)):
        axes.bar(0, 0, color=color, label=label)
    axes.axhline(
        1.0 / prediction.pace, color=_PACE, linestyle="--", linewidth=1, label="a minibatch, at the common pace"
    )
    axes.set_xticks(places, labels, rotation=60, ha="right", fontsize=7)
    axes.set_ylabel("seconds of a stage for one minibatch")
    axes.set_title(
        f"{model}: {prediction.rule}, N_m = {prediction.in_flight}, {prediction.samples_per_s:.4g} samples/s", pad=18
    )
    axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.1), ncols=4)
    with refuse_unwritable(path):
        figure.savefig(path, format="png")


def save_profile(profile: Profile, path: Path) -> None:
    """Write a figure of a profile as a PNG: time and memory of each layer.

    Raises:
        ConfigError: the file cannot be written.
    """
    from doll_lab.figures import new_figure

    layers = profile.layers
    at = range(len(layers))
    figure = new_figure(10.0, 1.6 + 0.28 * len(layers))
    times, memory = figure.subplots(1, 2, sharey=True)
    forward_ms = [1e3 * layer.forward_s for layer in layers]
    times.barh(at, forward_ms, color=_FORWARD, label="forward")
    times.barh(at, [1e3 * layer.backward_s for layer in layers], left=forward_ms, color=_BACKWARD, label="backward")
    times.set_xlabel(f"ms for {profile.batch_size} samples on {profile.device}", fontsize=9)
    parameters_mb = [layer.parameter_bytes / 1e6 for layer in layers]
    memory.barh(at, parameters_mb, color=_PARAMETERS, label="parameters")
    memory.barh(
        at, [layer.activation_bytes / 1e6 for layer in layers], left=parameters_mb, color=_ACTIVATIONS,
        label="activations",
    )  # fmt: skip
    memory.set_xlabel("MB", fontsize=9)
    times.set_yticks(at, [layer.name for layer in layers])
    times.invert_yaxis()
    for axes in (times, memory):
        axes.tick_params(labelsize=8)
        axes.grid(axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(profile.model, fontsize=10, x=0.01, ha="left")
    with refuse_unwritable(path):
        figure.savefig(path, format="png")
