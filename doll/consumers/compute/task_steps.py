"""The steps of a task that defines them itself (`Task.step`), in place of a gradient and an optimizer."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from doll.config import JobConfig
from doll.consumers.compute.bisection import failing
from doll.consumers.compute.gradient import Gradient
from doll.consumers.compute.guard import GuardedGradient, Samples
from doll.errors import TaskError
from doll.model.flat_model import FlatModel
from doll.task.base import Task

_MAX_REASON_CHARS: Final = 300


class OwnSteps:
    """`BatchComputer` that asks the task for the change of the weights.

    The random numbers of a batch depend on the job's seed, the worker and the batch's number only: a batch that is
    computed again draws the same ones.
    """

    def __init__(self, config: JobConfig, task: Task, model: FlatModel, worker: int) -> None:
        self._name = config.task.cls
        self._seed = config.seed
        self._task = task
        self._model = model
        self._worker = worker

    def compute(self, x: npt.NDArray[Any], y: npt.NDArray[Any], *, batch: int) -> GuardedGradient:
        """Without the samples at which the task fails; `values` is the change of the weights, loss and metrics are of
        the weights before it.

        Raises:
            TaskError: the task fails on all of them, or on none alone.
            MemoryError, OSError: the fault is this machine's.
        """
        samples = Samples(x, y)
        gradient, problem = self._try(samples, batch)
        if gradient is not None:
            return GuardedGradient(gradient, {})
        bad = failing(range(len(x)), lambda part: self._try(samples.of(part), batch)[1])
        left = [at for at in range(len(x)) if at not in bad]
        if not bad or not left:
            raise TaskError(
                f"{self._name}.step() fails on {'no sample alone' if not bad else 'every sample'} of a batch, but on "
                f"the batch: {problem}; correct the task or its records"
            )
        gradient, problem = self._try(samples.of(left), batch)
        if gradient is None:
            raise TaskError(f"{self._name}.step() fails on samples that it takes one by one: {problem}")
        return GuardedGradient(gradient, bad)

    def _try(self, samples: Samples, batch: int) -> tuple[Gradient | None, str]:
        """The step, or what is wrong with it."""
        weights: npt.NDArray[np.float32] = self._model.flat.detach().numpy()
        before = weights.copy()
        try:
            loss, metrics = self._loss(samples)
            rng = np.random.default_rng([self._seed, self._worker, batch])
            step = self._task.step(weights, samples.x, samples.y, rng)
        except (MemoryError, OSError):
            raise
        except Exception as exc:  # the user's code may raise anything
            return None, f"{type(exc).__name__}: {exc}"[:_MAX_REASON_CHARS]
        finally:
            weights[:] = before
        if not isinstance(step, np.ndarray) or step.dtype != np.float32 or step.shape != weights.shape:
            got = f"{step.dtype} {step.shape}" if isinstance(step, np.ndarray) else type(step).__name__
            raise TaskError(f"{self._name}.step(): expected a float32 array of shape {weights.shape}, got {got}")
        if not math.isfinite(loss):
            return None, f"the loss is {loss}"
        parameters = step[: self._model.num_parameters]
        norm = float(np.linalg.norm(parameters.astype(np.float64)))
        if not math.isfinite(norm):
            return None, "the step is not finite"
        count = len(samples.x)
        values = step.copy()
        floats = slice(self._model.num_parameters, self._model.num_floats)
        values[floats] = weights[floats] * np.float32(count)
        values[self._model.num_floats :] = weights[self._model.num_floats :]
        return Gradient(values, loss * count, {name: value * count for name, value in metrics.items()}, norm), ""

    def _loss(self, samples: Samples) -> tuple[float, dict[str, float]]:
        x, y = (torch.from_numpy(np.ascontiguousarray(part)) for part in samples)
        with torch.no_grad():
            output = self._task.forward(self._model.module.eval(), x)
            return float(self._task.loss(output, y)), dict(self._task.metrics(output, y))
