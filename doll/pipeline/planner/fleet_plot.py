"""A picture of an allocation: the time of each stage of each virtual worker."""

from __future__ import annotations

from pathlib import Path

from doll.pipeline.planner.prediction import Prediction
from doll.process.files import refuse_unwritable

_FORWARD, _BACKWARD, _RECEIVE, _PACE = "#e3a72f", "#59a14f", "#9d755d", "#333333"


def draw(prediction: Prediction, model: str, path: Path) -> None:
    """Write the picture to `path` as a PNG.

    Raises:
        ConfigError: it cannot be written.
    """
    from doll.process.figures import Figure, FigureCanvasAgg

    stages = [stage for worker in prediction.workers for stage in worker.partition.stages]
    figure = Figure(figsize=(max(6.0, 1.5 + 0.45 * len(stages)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
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
        figure.savefig(path, dpi=110, format="png")
