"""The held-out loss and metrics of a model, always on the same samples, which are not in the stream."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from typing import NamedTuple

import torch

from doll.errors import ConfigError
from doll.metrics.states import MetricState, merged, values_of
from doll.task import passes
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

    def _chunks(self) -> Iterator[slice]:
        """Yield parts that are computed together. Consecutive samples of a group are in one part."""
        start, group = 0, self._samples.group
        while start < len(self):
            stop = min(start + CHUNK_SAMPLES, len(self))
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
        module.eval()
        loss_sum, total_weight, sums, states = 0.0, 0.0, dict[str, float](), dict[str, list[MetricState]]()
        try:
            with torch.inference_mode():
                for chunk in self._chunks():
                    inputs = passes.inputs_of(self._task, self._samples.take(chunk))
                    output = passes.forward(self._task, module, inputs)
                    loss_sum += passes.loss(self._task, output, inputs).value
                    total_weight += inputs.total_weight
                    for name, value in passes.metric_values(self._task, output, inputs).items():
                        if isinstance(value, MetricState):
                            states.setdefault(name, []).append(value.in_memory())
                        else:
                            sums[name] = sums.get(name, 0.0) + value
            values = [values_of(name, merged(parts)) for name, parts in states.items()]
        except Exception as exc:  # the user's code may raise anything
            name = type(self._task).__name__
            raise ConfigError(
                f"{name} cannot be evaluated on its own held-out samples: {type(exc).__name__}: {exc}"
            ) from exc
        if not total_weight:
            raise ConfigError(f"{type(self._task).__name__}.holdout(): expected a sample with a weight above 0")
        means = {name: total / total_weight for name, total in sums.items()}
        return HeldOutError(loss_sum / total_weight, dict(ChainMap(means, *values)))
