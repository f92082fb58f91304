"""Held-out loss and metrics of a model: always the same samples, which are not in the stream."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from doll.errors import ConfigError
from doll.task.base import Task, stack

CHUNK_SAMPLES = 250


class HeldOutError(NamedTuple):
    """Means over the held-out samples."""

    loss: float
    metrics: dict[str, float]

    @property
    def accuracy(self) -> float | None:
        return self.metrics.get("accuracy")


class HeldOut:
    """The task's held-out samples, as tensors.

    Args:
        task: the user's task.
        max_samples: number of samples that are taken from `task.holdout()`.

    Raises:
        ConfigError: `holdout()` fails, or its samples differ in shape.
    """

    def __init__(self, task: Task, max_samples: int) -> None:
        self._task = task
        try:
            x, y = stack(itertools.islice(task.holdout(), max_samples))
        except Exception as exc:  # the user's code may raise anything
            raise ConfigError(f"{type(task).__name__}.holdout() failed: {type(exc).__name__}: {exc}") from exc
        self._x, self._y = torch.from_numpy(x), torch.from_numpy(y)

    def __len__(self) -> int:
        return len(self._x)

    def evaluate(self, module: torch.nn.Module) -> HeldOutError:
        """Means of loss and metrics of `module`, in evaluation mode, over all held-out samples.

        Raises:
            ConfigError: the task's forward, loss or metrics fail on its own held-out samples.
            ValueError: there are no held-out samples.
        """
        if not len(self):
            raise ValueError("expected held-out samples, the task has none")
        module.eval()
        loss_sum, sums = 0.0, dict[str, float]()
        try:
            with torch.inference_mode():
                for start in range(0, len(self), CHUNK_SAMPLES):
                    x, y = self._x[start : start + CHUNK_SAMPLES], self._y[start : start + CHUNK_SAMPLES]
                    output = self._task.forward(module, x)
                    loss_sum += float(self._task.loss(output, y)) * len(x)
                    for name, value in self._task.metrics(output, y).items():
                        sums[name] = sums.get(name, 0.0) + float(value) * len(x)
        except Exception as exc:  # the user's code may raise anything
            name = type(self._task).__name__
            raise ConfigError(
                f"{name} cannot be evaluated on its own held-out samples: {type(exc).__name__}: {exc}"
            ) from exc
        return HeldOutError(loss_sum / len(self), {name: total / len(self) for name, total in sums.items()})
