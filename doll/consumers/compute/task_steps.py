"""Steps that a task computes itself (`Task.step`, `Task.step_rows`), instead of a gradient and an optimizer."""

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
from doll.consumers.compute.guard import GuardedGradient
from doll.errors import BlobError, ServiceUnavailableError, TaskError
from doll.model.flat_model import FlatModel
from doll.model.random_numbers import draw_from
from doll.tables.embedding_tables import norm as norm_of_rows
from doll.tables.rows import Floats, Ids, Rows
from doll.task import passes, trees
from doll.task.base import Task
from doll.task.batches import SampleBatch
from doll.task.trees import Array, Tree

_MAX_REASON_CHARS: Final = 300


class OwnSteps:
    """A `BatchComputer` that asks the task for the change of the weights.

    The random numbers of a batch depend only on its seed, so they are the same when the batch is computed again.
    """

    usual: tuple[float, ...] = ()  # no batch is inspected

    def __init__(self, config: JobConfig, task: Task, model: FlatModel) -> None:
        self._name = config.task.cls
        self._task = task
        self._model = model

    def compute(
        self, x: Tree, y: Tree, weight: Array | None = None, group: Array | None = None, *, seed: int
    ) -> GuardedGradient:
        """Return the task's step without the samples on which the task fails. `values` of the result is the change of
        the weights; loss and metrics belong to the weights before the step.

        Raises:
            TaskError: the task fails on all samples, or on the batch but on no sample alone.
            MemoryError, OSError: the fault is this machine's.
            BlobError, ServiceUnavailableError: rows of tables do not arrive.
        """
        samples = SampleBatch(x, y, weight, group)
        everything = range(samples.num_samples)
        gradient, problem = self._try(samples, seed)
        if gradient is not None:
            return GuardedGradient(gradient, {})
        bad = failing(everything, lambda part: self._try(samples.take(part), seed)[1])
        left = [at for at in everything if at not in bad]
        if not bad or not left:
            raise TaskError(
                f"{self._name}.step() fails on {'no sample alone' if not bad else 'every sample'} of a batch, but on "
                f"the batch: {problem}; correct the task or its records"
            )
        gradient, problem = self._try(samples.take(left), seed)
        if gradient is None:
            raise TaskError(f"{self._name}.step() fails on samples that it takes one by one: {problem}")
        return GuardedGradient(gradient, bad)

    def _try(self, samples: SampleBatch, seed: int) -> tuple[Gradient | None, str]:
        weights: npt.NDArray[np.float32] = self._model.host.numpy()
        before = weights.copy()
        draw_from(seed)
        try:
            inputs = passes.inputs_of(self._task, samples)
            loss_sum, metric_sums = self._loss(inputs)
            step, rows = self._step(weights, inputs, np.random.default_rng(seed))
        except (MemoryError, OSError, BlobError, ServiceUnavailableError, TaskError):
            raise
        except Exception as exc:  # the user's code may raise anything
            return None, f"{type(exc).__name__}: {exc}"[:_MAX_REASON_CHARS]
        finally:
            weights[:] = before
        if not isinstance(step, np.ndarray) or step.dtype != np.float32 or step.shape != weights.shape:
            got = f"{step.dtype} {step.shape}" if isinstance(step, np.ndarray) else type(step).__name__
            raise TaskError(f"{self._name}.step(): expected a float32 array of shape {weights.shape}, got {got}")
        self._check(rows)
        if not math.isfinite(loss_sum):
            return None, f"the loss is {loss_sum}"
        parameters = step[: self._model.num_parameters]
        norm = math.hypot(float(np.linalg.norm(parameters.astype(np.float64))), norm_of_rows(rows))
        if not math.isfinite(norm):
            return None, "the step is not finite"
        total = inputs.total_weight
        values = step.copy()
        floats = slice(self._model.num_parameters, self._model.num_floats)
        values[floats] = weights[floats] * np.float32(total)
        values[self._model.num_floats :] = weights[self._model.num_floats :]
        return Gradient(torch.from_numpy(values), loss_sum, metric_sums, total, norm, rows=rows), ""

    def _step(
        self, weights: npt.NDArray[np.float32], inputs: passes.Inputs, rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.float32], Mapping[str, Rows]]:
        x, y = (trees.mapped(torch.Tensor.numpy, part) for part in (inputs.x, inputs.y))
        method = "step_rows" if self._task.steps_rows else "step"
        more: dict[str, Any] = {}
        for name, tensor in (("weight", inputs.weight), ("group", inputs.group)):
            if passes.takes(self._task, method, name):
                more[name] = None if tensor is None else tensor.numpy()
            elif name == "weight" and tensor is not None:
                raise TaskError(
                    f"{self._name}: samples have weights: expected {method}() to have a parameter weight for them"
                )
        if not self._task.steps_rows:
            return self._task.step(weights, x, y, rng, **more), {}
        step, rows = self._task.step_rows(weights, self._look_up, x, y, rng, **more)
        return step, {name: part for name, part in rows.items() if len(part.ids)}

    def _look_up(self, name: str, ids: Ids) -> Floats:
        if self._model.tables is None:
            raise KeyError(name)
        return self._model.tables.look_up(name, ids)

    def _check(self, rows: Mapping[str, Rows]) -> None:
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

    def _loss(self, inputs: passes.Inputs) -> tuple[float, dict[str, float | bytes]]:
        with torch.no_grad():
            output = passes.forward(self._task, self._model.module.eval(), inputs)
            return passes.loss(self._task, output, inputs).value, passes.metric_sums(self._task, output, inputs)
