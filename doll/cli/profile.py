"""`doll profile`: measures time and memory of each layer of a job's model on this machine, for pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from doll import extensions
from doll.amounts import aligned, byte_size
from doll.cli import options
from doll.cli.output import emit, progress_bar
from doll.process.files import refuse_unwritable, write_atomically

if TYPE_CHECKING:
    from doll.pipeline.profiling.profile import LayerProfile, Profile


def profile(
    job: options.JobOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Write the profile to this file, for worker.pipeline.profile.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Plot time and memory of each layer.")] = None,
    device: Annotated[str, typer.Option(help="Device to measure on: cpu or cuda:N.")] = "cpu",
    repeats: Annotated[int, typer.Option(min=1, help="Runs per layer; the table shows the medians.")] = 5,
    as_json: options.JsonOption = False,
) -> None:
    """Measure forward and backward time, activations and parameters of each layer of a job's model.

    The command uses data.batch_size held-out samples of the task, or random samples if the task has none. Stop other
    programs first: they would change the measured times.

    Example: doll profile my.yaml --out profile.json --plot profile.png
    """
    import numpy as np
    import torch

    from doll.model.flat_model import build
    from doll.pipeline.profiling.layers import check_cut, layers_of
    from doll.pipeline.profiling.profiler import profile_layers, sample_batch
    from doll.task.base import load_task
    from doll.task.passes import inputs_of

    config = job.target().config
    save_profile = None
    if plot is not None:
        save_profile = extensions.need(extensions.PICTURES, "profile", "doll profile --plot")
    torch.set_num_threads(config.worker.torch_threads)
    task = load_task(config)
    module = build(config, task, with_rows=False).module
    layers = layers_of(task, module)
    batch = sample_batch(task, module, config.data.batch_size, np.random.default_rng(config.seed))
    check_cut(task, module, layers, inputs_of(task, batch))
    with progress_bar("layers", len(layers)) as advance:
        measured = profile_layers(
            task, layers, batch, model=config.task.cls, device=device, repeats=repeats,
            progress=lambda done: advance(completed=done, description=f"layer {done} of {len(layers)}"),
        )  # fmt: skip
    notes = []
    if out is not None:
        with refuse_unwritable(out):
            write_atomically(out, measured.to_json())
        notes.append(f"profile: {out}")
    if save_profile is not None:
        save_profile(measured, plot)
        notes.append(f"plot: {plot}")
    content = {**json.loads(measured.to_json())["profile"], "notes": notes}
    emit(as_json, content, "\n".join([_table(measured), *notes]))


def _table(profile: Profile) -> str:
    """Return a table with one line for each layer and one line for the sums."""
    layers = profile.layers
    total_s = sum(layer.compute_s for layer in layers)
    rows = [("layer", "forward", "backward", "share", "parameters", "activations", "output")]
    for layer in layers:
        share = layer.compute_s / total_s if total_s else 0.0
        rows.append((layer.name, *_times(layer), f"{share:.1%}", *_sizes(layer), byte_size(layer.output_bytes)))
    rows.append(("all", *_times(*layers), "", *_sizes(*layers), ""))
    title = f"{profile.model}: {len(layers)} layers, {profile.batch_size} samples, on {profile.device}"
    return "\n".join([title, *aligned(rows)])


def _times(*layers: LayerProfile) -> tuple[str, str]:
    forward_s, backward_s = sum(layer.forward_s for layer in layers), sum(layer.backward_s for layer in layers)
    return f"{1e3 * forward_s:.3f} ms", f"{1e3 * backward_s:.3f} ms"


def _sizes(*layers: LayerProfile) -> tuple[str, str]:
    parameters = sum(layer.parameter_bytes for layer in layers)
    return byte_size(parameters), byte_size(sum(layer.activation_bytes for layer in layers))
