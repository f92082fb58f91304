"""Which layers each stage of a job's virtual workers has."""

from __future__ import annotations

import torch

from doll.config import JobConfig
from doll.task import Task


def cut(config: JobConfig, task: Task, module: torch.nn.Module, worker: int) -> list[list[torch.nn.Module]]:
    layers = list(module)  # type: ignore[call-overload]
    pipeline = config.worker.pipeline
    assert pipeline is not None
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    parts = []
    at = 0
    for number in range(pipeline.stages):
        left = pipeline.stages - number - 1
        stop = at + 1
        goal = sum(sizes[at:]) / (left + 1)
        while stop < len(layers) - left and sum(sizes[at:stop]) < goal:
            stop += 1
        if not left:
            stop = len(layers)
        parts.append(layers[at:stop])
        at = stop
    return parts
