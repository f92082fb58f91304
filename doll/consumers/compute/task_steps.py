"""Steps that a task defines itself (`Task.step`, `Task.step_rows`), in place of a gradient and an optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from doll.config import JobConfig
from doll.consumers.compute.bisection import failing
from doll.consumers.compute.gradient import Gradient
from doll.consumers.compute.guard import GuardedGradient, Samples
from doll.errors import BlobError, ServiceUnavailableError, TaskError
from doll.model.flat_model import FlatModel
from doll.tables.embedding_tables import norm as norm_of_rows
from doll.tables.rows import Floats, Ids, Rows
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
            BlobError, ServiceUnavailableError: rows of tables do not come.
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
            step, rows = self._step(weights, samples, rng)
        except (MemoryError, OSError, BlobError, ServiceUnavailableError):
            raise
        except Exception as exc:  # the user's code may raise anything
            return None, f"{type(exc).__name__}: {exc}"[:_MAX_REASON_CHARS]
        finally:
            weights[:] = before
        if not isinstance(step, np.ndarray) or step.dtype != np.float32 or step.shape != weights.shape:
            got = f"{step.dtype} {step.shape}" if isinstance(step, np.ndarray) else type(step).__name__
            raise TaskError(f"{self._name}.step(): expected a float32 array of shape {weights.shape}, got {got}")
        self._check(rows)
        if not math.isfinite(loss):
            return None, f"the loss is {loss}"
        parameters = step[: self._model.num_parameters]
        norm = math.hypot(float(np.linalg.norm(parameters.astype(np.float64))), norm_of_rows(rows))
        if not math.isfinite(norm):
            return None, "the step is not finite"
        count = len(samples.x)
        values = step.copy()
        floats = slice(self._model.num_parameters, self._model.num_floats)
        values[floats] = weights[floats] * np.float32(count)
        values[self._model.num_floats :] = weights[self._model.num_floats :]
        sums = {name: value * count for name, value in metrics.items()}
        return Gradient(values, loss * count, sums, norm, rows=rows), ""

    def _step(
        self, weights: npt.NDArray[np.float32], samples: Samples, rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.float32], Mapping[str, Rows]]:
        if not self._task.steps_rows:
            return self._task.step(weights, samples.x, samples.y, rng), {}
        step, rows = self._task.step_rows(weights, self._look_up, samples.x, samples.y, rng)
        return step, {name: part for name, part in rows.items() if len(part.ids)}

    def _look_up(self, name: str, ids: Ids) -> Floats:
        if self._model.tables is None:
            raise KeyError(name)
        return self._model.tables.look_up(name, ids)

    def _check(self, rows: Mapping[str, Rows]) -> None:
        """Check that they are rows of the model's tables."""
        shapes = {} if self._model.tables is None else self._model.tables.shapes
        for name, (ids, values) in rows.items():
            if name not in shapes:
                problem = f"expected one of {sorted(shapes)}"
            elif not (problem := shapes[name].problem(ids)):
                shape = (len(ids), shapes[name].width)
                if not isinstance(values, np.ndarray) or values.dtype != np.float32 or values.shape != shape:
                    problem = f"expected float32 values of shape {shape}"
            if problem:
                raise TaskError(f"{self._name}.step_rows(): table {name!r}: {problem}")

    def _loss(self, samples: Samples) -> tuple[float, dict[str, float]]:
        x, y = (torch.from_numpy(np.ascontiguousarray(part)) for part in samples)
        with torch.no_grad():
            output = self._task.forward(self._model.module.eval(), x)
            return float(self._task.loss(output, y)), dict(self._task.metrics(output, y))
