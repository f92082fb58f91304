"""Algorithm 2: the gradient of one batch at exactly the given weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from doll.model import FlatModel
from doll.task import Task


class Gradient(NamedTuple):
    """Sums over the samples of one batch.

    Attributes:
        values: float32, shape (numel,), laid out as `doll.model` says. It is the model's own memory: store it before
            the next `compute`.
        loss_sum: sum of the sample losses at the given weights, before learning from them.
        metric_sums: sums of the task's metrics over the samples.
    """

    values: npt.NDArray[np.float32]
    loss_sum: float
    metric_sums: dict[str, float]


class GradientComputer:
    """One worker's replica of the model. Not thread-safe: one thread computes."""

    def __init__(self, task: Task, model: FlatModel) -> None:
        self._task = task
        self._model = model
        self.loaded: str | None = None  # key of the weights that the replica holds

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """What the replica holds: float32, shape (numel,)."""
        array: npt.NDArray[np.float32] = self._model.flat.detach().numpy()
        return array

    def load(self, key: str, weights: npt.NDArray[np.float32]) -> None:
        """Take over `weights`, float32, shape (numel,)."""
        self.loaded = None
        self.weights[:] = weights
        self.loaded = key

    def compute(self, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> Gradient:
        """Gradient of the summed loss over samples `x` of shape (n, ...), `y` of shape (n, ...), n >= 1.

        The replica is left as it was: a worker may compute several batches at one version.
        """
        model = self._model
        buffers = self.weights[model.num_parameters :].copy()
        try:
            return self._compute(x, y)
        finally:
            model.gather()
            self.weights[model.num_parameters :] = buffers

    def _compute(self, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> Gradient:
        model, task, n = self._model, self._task, len(x)
        model.grad.zero_()
        module = model.module.train()
        if n == 1:
            # One sample has no variance: torch refuses, and a batch whose other records were refused would end the
            # worker. Its normalisation takes the statistics so far and leaves them alone.
            for part in module.modules():
                if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
                    part.eval()
        target = torch.from_numpy(np.ascontiguousarray(y))
        output = task.forward(module, torch.from_numpy(np.ascontiguousarray(x)))
        loss = task.loss(output, target)
        torch.autograd.backward(loss * n)  # the task's loss is a mean; the sum costs no pass over the gradient this way
        with torch.no_grad():
            metrics = task.metrics(output.detach(), target)
        model.gather()
        values, floats = model.grad.numpy(), slice(model.num_parameters, model.num_floats)
        np.multiply(self.weights[floats], np.float32(n), out=values[floats])
        values[model.num_floats :] = self.weights[model.num_floats :]
        return Gradient(values, float(loss.detach()) * n, {name: value * n for name, value in metrics.items()})
