"""Which layers each stage of a job's virtual workers has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from doll.config import JobConfig
from doll.config.pipeline import PipelineConfig
from doll.errors import ConfigError
from doll.pipeline.layers import Layer, check_cut, layers_of, trial_input
from doll.pipeline.live_memory import live_rule
from doll.pipeline.partition import partition_in_order
from doll.pipeline.profile import Device, Network, Profile
from doll.task import Task


def cut(config: JobConfig, task: Task, model: torch.nn.Module, worker: int) -> list[list[Layer]]:
    """The layers of each stage of one worker, first stage first.

    Raises:
        ConfigError: the model cannot be cut so.
    """
    pipeline = config.worker.pipeline
    assert pipeline is not None
    layers = layers_of(task, model)
    if (x := trial_input(task, model, 2)) is not None:
        check_cut(task, model, layers, x)
    if len(layers) < pipeline.stages:
        raise ConfigError(
            f"worker.pipeline.stages: expected at most {len(layers)} stages, one for each layer of the model "
            f"({', '.join(layer.name for layer in layers)}), got {pipeline.stages}"
        )
    names = [layer.name for layer in layers]
    if pipeline.layers is not None:
        stops = _named_stops(names, pipeline.layers)
    elif pipeline.profile is not None:
        stops = _profiled_stops(config, pipeline, names, worker)
    else:
        stops = even_stops([sum(p.numel() for p in layer.module.parameters()) for layer in layers], pipeline.stages)
    starts = [0, *stops[:-1]]
    return [layers[start:stop] for start, stop in zip(starts, stops, strict=True)]


def _profiled_stops(config: JobConfig, pipeline: PipelineConfig, names: Sequence[str], worker: int) -> list[int]:
    """The partition with the least bottleneck, on the worker's devices in their order.

    Raises:
        ConfigError: the profile is of another model or batch size, or a stage does not fit its device.
    """
    assert pipeline.profile is not None
    path = config.path(pipeline.profile)
    profile = Profile.load(path)
    if [layer.name for layer in profile.layers] != list(names) or profile.batch_size != config.data.batch_size:
        raise ConfigError(
            f"worker.pipeline.profile: {path} is of {len(profile.layers)} layers and batches of {profile.batch_size}, "
            f"the job's model has {len(names)} and data.batch_size is {config.data.batch_size}: profile it again "
            f"(doll profile JOB.yaml --out {path.name})"
        )
    in_flight = config.training.policy.batches_per_push
    devices = [
        Device(
            f"{device.device} of stage {number}", device.speed / device.slowdown,
            math.inf if device.memory_bytes is None else device.memory_bytes,
        )
        for number, device in enumerate(pipeline.devices_of(worker), 1)
    ]  # fmt: skip
    rule = live_rule(profile, config.training.optimizer, in_flight)
    partition = partition_in_order(profile, devices, Network(), in_flight=in_flight, memory=rule)
    return [stage.stop for stage in partition.stages]


def even_stops(sizes: Sequence[int], parts: int) -> list[int]:
    """Cut `sizes` into `parts` runs of one or more, such that the largest sum is as small as possible, and the others
    are about even: where each ends."""
    sums = list(accumulate(sizes, initial=0))
    # best[n]: the smallest largest sum of the first n in so many runs, the sum of squares, where the last run begins.
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
    """Where each stage of `wanted` ends.

    Raises:
        ConfigError: a layer is missing, unknown, named twice, or not behind the one before it.
    """
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
