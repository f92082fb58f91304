"""The layers of each stage of a job's virtual workers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from doll.config import JobConfig
from doll.errors import ConfigError, TaskError
from doll.pipeline.planner.profiled import load_profile, stops_by_profile
from doll.pipeline.profiling.layers import Layer, chain, check_cut, layers_of, trial_input
from doll.task import passes
from doll.task.base import Task
from doll.task.batches import SampleBatch


def cut(config: JobConfig, task: Task, model: torch.nn.Module, worker: int) -> list[list[Layer]]:
    """Return the layers of each stage of one worker, in the order of the stages. Raise ConfigError if the model cannot
    be cut as the job file requires."""
    pipeline = config.worker.pipeline
    assert pipeline is not None
    layers = layers_of(task, model)
    if len(layers) < pipeline.stages:
        raise ConfigError(
            f"worker.pipeline.stages: expected at most {len(layers)} stages, one for each layer of the model "
            f"({', '.join(layer.name for layer in layers)}), got {pipeline.stages}"
        )
    names = [layer.name for layer in layers]
    if pipeline.layers is not None:
        stops = _named_stops(names, pipeline.layers)
    elif pipeline.profile is not None:
        profile = load_profile(config)
        if [layer.name for layer in profile.layers] != names:
            few = ", ".join(layer.name for layer in profile.layers[:8])
            raise ConfigError(
                f"worker.pipeline.profile: {pipeline.profile} has the layers {few}, the job's model has "
                f"{', '.join(names[:8])}: profile it again (doll profile JOB.yaml --out {pipeline.profile.name})"
            )
        stops = stops_by_profile(config, profile, worker)
    else:
        stops = even_stops([sum(p.numel() for p in layer.module.parameters()) for layer in layers], pipeline.stages)
    starts = [0, *stops[:-1]]
    parts = [layers[start:stop] for start, stop in zip(starts, stops, strict=True)]
    if (inputs := trial_input(task, model, 2).inputs) is not None:
        check_parts(task, model, parts, inputs)
    return parts


def check_parts(task: Task, model: torch.nn.Module, parts: Sequence[Sequence[Layer]], inputs: passes.Inputs) -> None:
    """Check the stages of `cut`; see `check_cut`."""
    stages = [
        Layer(part[0].name if len(part) == 1 else f"{part[0].name}..{part[-1].name}", chain(part)) for part in parts
    ]
    check_cut(task, model, stages, inputs)


def check_with_samples(
    task: Task, model: torch.nn.Module, parts: Sequence[Sequence[Layer]], samples: SampleBatch, *, batch: int
) -> None:
    """Check the stages of `cut` with at least one sample of the stream. In training mode, the model's output may differ
    from call to call because the model draws its own random numbers. Then only the comparison in evaluation mode
    counts.

    Raises:
        TaskError: the stages compute another result than the model. A restart would not change this.
    """
    try:
        check_parts(task, model, parts, passes.inputs_of(task, samples))
    except ConfigError as exc:
        raise TaskError(f"batch {batch}: {exc}") from exc


def even_stops(sizes: Sequence[int], parts: int) -> list[int]:
    """Cut `sizes` into `parts` runs of at least one element, so that the largest sum is as small as possible and the
    other sums are about equal. Return the end of each run."""
    sums = list(accumulate(sizes, initial=0))
    # best[n]: smallest largest sum of the first n elements in this many runs, sum of squares, begin of the last run.
    best = [(sums[n], sums[n] ** 2, 0) for n in range(len(sums))]
    begins = []
    for part in range(2, parts + 1):
        longer = [(0, 0, 0)] * len(sums)
        for n in range(part, len(sums)):
            longer[n] = min(
                (max(best[at][0], sums[n] - sums[at]), best[at][1] + (sums[n] - sums[at]) ** 2, at)
                for at in range(part - 1, n)
            )
        begins.append([at for *_, at in longer])
        best = longer
    stops = [len(sizes)]
    for starts in reversed(begins):
        stops.insert(0, starts[stops[0]])
    return stops


def _named_stops(names: Sequence[str], wanted: Sequence[Sequence[str]]) -> list[int]:
    """Return the end of each stage of `wanted`. Raise ConfigError if a layer is missing, unknown, named twice, or not
    directly after the layer before it."""
    at = 0
    stops = []
    for stage, layers in enumerate(wanted, 1):
        for name in layers:
            if name not in names:
                raise ConfigError(
                    f"worker.pipeline.layers: stage {stage}: expected a layer of {', '.join(names)}; got {name!r}"
                )
            if at == len(names) or name != names[at]:
                expected = repr(names[at]) if at < len(names) else "no other layer"
                raise ConfigError(
                    f"worker.pipeline.layers: stage {stage}: the stages must hold all layers, in their order, each "
                    f"once: expected {expected}, got {name!r}"
                )
            at += 1
        stops.append(at)
    if at < len(names):
        raise ConfigError(
            f"worker.pipeline.layers: the stages must hold all layers: expected {names[at]!r} in stage {len(wanted)}"
        )
    return stops
