"""A picture of a profile: time and memory of each layer."""

from __future__ import annotations

from pathlib import Path

from doll.pipeline.profiling.profile import Profile
from doll.process.files import refuse_unwritable

_FORWARD, _BACKWARD, _PARAMETERS, _ACTIVATIONS = "#e3a72f", "#5aa155", "#4c78a8", "#b0c4de"


def save(profile: Profile, path: Path) -> None:
    """Write the picture as a PNG.

    Raises:
        ConfigError: it cannot be written.
    """
    from doll.process.figures import Figure, FigureCanvasAgg

    layers = profile.layers
    at = range(len(layers))
    figure = Figure(figsize=(10.0, 1.6 + 0.28 * len(layers)), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
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
