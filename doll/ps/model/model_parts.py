"""The updaters that a job can have: a step on gradients, or the sum of the steps that workers made themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from doll.config import TrainingConfig
from doll.model.flat_model import FlatModel
from doll.optim.contribution import Contribution
from doll.optim.optimizer import WEIGHTS, Optimizer, diverged, is_finite, load_weights, tensor_of
from doll.optim.row_optimizer import row_optimizer
from doll.ps.model.updater import Updater
from doll.ps.tables.store import TableStore


class StepAdder:
    """`Updater` whose contributions are steps: what each worker's optimizer made of its batches, added as it is.

    Float buffers come as values times samples, as with gradients, and become the mean; other buffers become those of
    the last contribution.
    """

    clipped_by: Final = 1.0

    def __init__(self, model: FlatModel) -> None:
        self._model = model
        self._own = self._flat = model.flat.detach()
        self._sum = torch.zeros_like(self._own)
        self._sum_is_empty = True

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        array: npt.NDArray[np.float32] = self._flat.numpy()
        return array

    @property
    def num_parameters(self) -> int:
        return self._model.num_parameters

    def add(self, step: Contribution) -> None:
        tensor, floats = tensor_of(step), self._model.num_floats
        if self._sum_is_empty:
            self._sum[:] = tensor
            self._sum_is_empty = False
        else:
            self._sum[:floats].add_(tensor[:floats])
            self._sum[floats:] = tensor[floats:]

    def max_change(self, step: Contribution) -> float:
        parameters = step[: self._model.num_parameters]
        largest = float(max(parameters.max(initial=0.0), -parameters.min(initial=0.0)))
        return largest if math.isfinite(largest) else math.inf

    def apply(
        self,
        steps: Sequence[Contribution],
        scale: float,
        num_samples: int,
        into: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Add `scale` times the sum of the steps that were added and `steps`, in this order.

        Raises:
            DivergedError: a number of a step or of the weights is not finite.
        """
        for step in steps:
            self.add(step)
        if self._sum_is_empty:
            return  # nothing but refused records: the version counts, the weights stay
        self._sum_is_empty = True
        total, n, floats = self._sum, self._model.num_parameters, self._model.num_floats
        target = self._own if into is None else torch.from_numpy(into)
        torch.add(self._flat[:n], total[:n], alpha=scale, out=target[:n])
        if num_samples > 0:
            total[n:floats] /= num_samples
            target[n:] = total[n:]
        elif target is not self._flat:
            target[n:] = self._flat[n:]
        self._flat = target
        if not is_finite(target[:floats]):
            raise diverged("after the steps the weights are" if is_finite(total[:floats]) else "a worker's step is")

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        return {WEIGHTS: self.weights.copy() if self._flat is self._own else self.weights}

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        load_weights(self._model, tensors)
        self._flat = self._own


class ModelParts(NamedTuple):
    """The model at the server.

    Attributes:
        updater: of the flat vector.
        tables: None where the model has no tables.
    """

    updater: Updater
    tables: TableStore | None = None

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Of both, for a checkpoint."""
        tensors = self.updater.tensors()
        return tensors if self.tables is None else tensors | self.tables.tensors()

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue from a checkpoint's tensors; `doll.ps.model.updater.HoldsTensors`."""
        self.updater.load(tensors)
        if self.tables is not None:
            self.tables.load(tensors)


def make_parts(config: TrainingConfig, model: FlatModel) -> ModelParts:
    """What `training` asks for; it owns the weights and the tables' rows of `model` from now on.

    Raises:
        ConfigError: an optimizer that cannot be used for tables.
    """
    tables = None
    if model.tables is not None:
        optimizer = None if config.policy.sends_steps else row_optimizer(config.optimizer)
        tables = TableStore(model.tables.take_initial(), optimizer)
    if config.policy.sends_steps:
        return ModelParts(StepAdder(model), tables)
    norm = (lambda: 0.0) if tables is None else tables.norm
    return ModelParts(Optimizer(model, config.optimizer, config.clip_norm, norm_of_tables=norm), tables)
