"""The held-out loss and metrics of a model, always on the same samples, which are not in the stream."""

from __future__ import annotations

import contextlib
import math
import time
from collections import ChainMap
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from doll.errors import ConfigError
from doll.evaluation.gates import MAX_BLOCKS, Block
from doll.evaluation.stored_weights import StoredWeights
from doll.metrics.states import MetricState, merged, values_of
from doll.model.flat_model import FlatModel
from doll.task import passes, trees
from doll.task.base import Task
from doll.task.batches import SampleBatch, batch_of
from doll.task.forms import NO_GROUP

CHUNK_SAMPLES = 250


class HeldOutError(NamedTuple):
    """The weighted means of loss and metrics over the held-out samples, and the metrics of merged states."""

    loss: float
    metrics: dict[str, float]

    @property
    def accuracy(self) -> float | None:
        return self.metrics.get("accuracy")


class HeldOut:
    """The held-out samples of a task, as tensors.

    Args:
        task: the user's task.
        max_samples: maximum number of samples from `task.holdout()`.
        samples: samples that replace those of `task.holdout()`.

    Raises:
        ConfigError: `holdout()` fails, or its samples have different shapes.
    """

    def __init__(self, task: Task, max_samples: int, samples: SampleBatch | None = None) -> None:
        self._task = task
        if samples is not None:
            self._samples = samples
            return
        try:
            self._samples = batch_of(task, task.holdout(), max_samples)
        except Exception as exc:  # the user's code may raise anything
            raise ConfigError(f"{type(task).__name__}.holdout() failed: {type(exc).__name__}: {exc}") from exc

    def __len__(self) -> int:
        return self._samples.num_samples

    def _chunks(self, size: int = CHUNK_SAMPLES) -> Iterator[slice]:
        """Yield parts that are computed together. Consecutive samples of a group are in one part."""
        start, group = 0, self._samples.group
        while start < len(self):
            stop = min(start + size, len(self))
            while group is not None and stop < len(self) and group[stop] == group[stop - 1] != NO_GROUP:
                stop += 1
            yield slice(start, stop)
            start = stop

    def evaluate(self, module: torch.nn.Module) -> HeldOutError:
        """Compute the means of loss and metrics of `module`, in evaluation mode, over all held-out samples.

        Raises:
            ConfigError: the task's forward, loss or metrics fail on its own held-out samples.
            ValueError: there are no held-out samples.
        """
        if not len(self):
            raise ValueError("expected held-out samples, the task has none")
        with self._errors():
            blocks = [block for block, _ in self._computed(module, CHUNK_SAMPLES)]
            states: dict[str, list[MetricState]] = {}
            for name, state in (item for block in blocks for item in block.states.items()):
                states.setdefault(name, []).append(state)
            values = [values_of(name, merged(parts)) for name, parts in states.items()]
        total_weight = sum(block.weight for block in blocks)
        if not total_weight:
            raise ConfigError(f"{type(self._task).__name__}.holdout(): expected a sample with a weight above 0")
        names = dict.fromkeys(name for block in blocks for name in block.sums)
        means = {name: sum(block.sums.get(name, 0.0) for block in blocks) / total_weight for name in names}
        return HeldOutError(means.pop("loss"), dict(ChainMap(means, *values)))

    def blocks(self, module: torch.nn.Module) -> tuple[list[Block], dict[str, npt.NDArray[Any]], float]:
        """Return the loss and the metrics of `module` in at most `MAX_BLOCKS` parts of the held-out samples, which are
        the same for each call; its outputs, flat, by name; and the seconds that these took.

        Raises:
            ConfigError: as `evaluate`.
        """
        size = -(-len(self) // MAX_BLOCKS)
        outputs: dict[str, list[npt.NDArray[Any]]] = {}
        blocks, seconds = [], 0.0
        with self._errors():
            for block, (output, taken_s) in self._computed(module, max(1, size)):
                blocks.append(block)
                seconds += taken_s
                leaves, structure = trees.flat(output)
                for name, leaf in zip(trees.dotted_names("output", structure), leaves, strict=True):
                    outputs.setdefault(name, []).append(leaf.float().numpy().reshape(-1))
        return blocks, {name: np.concatenate(parts) for name, parts in outputs.items()}, seconds

    def answers(self, module: torch.nn.Module) -> dict[str, npt.NDArray[Any]]:
        """Return the outputs of `module` by name, each of shape (n, ...). Outputs that are not rows of samples are left
        out.

        Raises:
            ConfigError: as `evaluate`.
        """
        answers: dict[str, list[npt.NDArray[Any]]] = {}
        with self._errors():
            for count, output in self.outputs(module):
                leaves, structure = trees.flat(output)
                for name, leaf in zip(trees.dotted_names("answer", structure), leaves, strict=True):
                    if leaf.ndim and len(leaf) == count:
                        answers.setdefault(name, []).append(leaf.float().numpy())
            return {name: np.concatenate(parts) for name, parts in answers.items()}

    def outputs(self, module: torch.nn.Module) -> Iterator[tuple[int, Any]]:
        """Yield the output of `module` for each part of the samples, with the number of these samples. The user's code
        may raise anything."""
        module.eval()
        for chunk in self._chunks():
            samples = self._samples.take(chunk)
            with torch.inference_mode():
                yield samples.num_samples, passes.forward(self._task, module, passes.inputs_of(self._task, samples))

    def _computed(self, module: torch.nn.Module, size: int) -> Iterator[tuple[Block, tuple[Any, float]]]:
        """Yield the metrics of each part of `size` samples, with the output and the time that it took."""
        module.eval()
        for chunk in self._chunks(size):
            with torch.inference_mode():
                inputs = passes.inputs_of(self._task, self._samples.take(chunk))
                began_s = time.perf_counter()
                output = passes.forward(self._task, module, inputs)
                taken_s = time.perf_counter() - began_s
                sums, states = dict[str, float](), dict[str, MetricState]()
                for name, value in passes.metric_values(self._task, output, inputs).items():
                    if isinstance(value, MetricState):
                        states[name] = value.in_memory()
                    else:
                        sums[name] = value
                sums["loss"] = passes.loss(self._task, output, inputs).value
            yield Block(inputs.total_weight, sums, states), (output, taken_s)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise ConfigError in place of any exception of the task, whose code may raise anything."""
        try:
            yield
        except Exception as exc:
            name = type(self._task).__name__
            raise ConfigError(
                f"{name} cannot be evaluated on its own held-out samples: {type(exc).__name__}: {exc}"
            ) from exc


def block_means(
    task: Task, model: FlatModel, weights: StoredWeights, samples: SampleBatch, metric: str
) -> list[float]:  # fmt: skip
    """Return the mean of a metric in each part of `samples` with a weight, by these weights. The parts are the same for
    all models. NaN: the task has no mean of this name.

    Raises:
        ConfigError: as `HeldOut.evaluate`.
    """
    weights.load_into(model)
    try:
        blocks = HeldOut(task, samples.num_samples, samples).blocks(model.module)[0]
    finally:
        model.restore_buffers()
    return [block.sums.get(metric, math.nan) / block.weight for block in blocks if block.weight > 0]
