"""One step of an optimizer on some rows of a table; other rows have no state.

The results are the same as with torch's optimizers on sparse gradients, to the bit (a test compares them): `SGD`,
`Adagrad` and `SparseAdam` (lazy Adam: the moments of rows without a gradient do not change). Torch has no row-wise
Adagrad.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

import torch

from doll.config import AdagradConfig, AdamConfig, OptimizerConfig, SgdConfig, TorchConfig, TrainingConfig
from doll.config.tables import (
    AnyRowOptimizerConfig,
    RowAdagradConfig,
    RowAdamConfig,
    RowSgdConfig,
    RowwiseAdagradConfig,
    settings_of_tables,
)
from doll.errors import ConfigError

_ADAM_EPSILON = 1e-8
_ADAGRAD_EPSILON = 1e-10


class RowOptimizer(ABC):
    """An optimizer of rows.

    Attributes:
        state_names: names of the parts of its state, which are zero at first.
        is_rowwise: whether each part of the state has one number for each row, instead of one for each number of the
            row.
    """

    state_names: tuple[str, ...] = ()
    is_rowwise: bool = False

    @abstractmethod
    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], number: int
    ) -> torch.Tensor:
        """Return the rows after the step, and change `state` in place.

        Args:
            rows, gradient: float32, shape (n, width).
            state: parts of the state by name, each float32 with shape (n, `state_width`).
            number: number of the table's step, from 1 on.
        """


@dataclass(frozen=True)
class RowSgd(RowOptimizer):
    """Stochastic gradient descent."""

    lr: float

    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], number: int
    ) -> torch.Tensor:
        return torch.add(rows, gradient, alpha=-self.lr)


@dataclass(frozen=True)
class RowAdagrad(RowOptimizer):
    """Adagrad (Duchi, Hazan, Singer, JMLR 12, 2011), diagonal.

    Attributes:
        initial_accumulator: first value of each sum of squares.
    """

    lr: float
    initial_accumulator: float = 0.0
    state_names = ("sum",)

    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], number: int
    ) -> torch.Tensor:
        total = state[self.state_names[0]]
        if self.initial_accumulator:
            total.masked_fill_(total == 0, self.initial_accumulator)  # after a step, the sum is at least this value
        squares = gradient.pow(2)
        total.add_(squares.mean(dim=1, keepdim=True) if self.is_rowwise else squares)
        return torch.add(rows, gradient / total.sqrt().add_(_ADAGRAD_EPSILON), alpha=-self.lr)


@dataclass(frozen=True)
class RowwiseAdagrad(RowAdagrad):
    """Adagrad with one sum for each row. Each step adds the mean of the squares of the row's gradient to this sum.

    Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation Models"
    (2021). TorchRec's `RowWiseAdagrad` is the same and has the same epsilon.
    """

    state_names = ("row_sum",)
    is_rowwise = True


@dataclass(frozen=True)
class LazyAdam(RowOptimizer):
    """Adam that changes the moments of a row only if the row has a gradient. The bias is corrected by the number of the
    table's steps, as in torch's `SparseAdam`."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    state_names = ("exp_avg", "exp_avg_sq")

    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], number: int
    ) -> torch.Tensor:
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.add_(gradient.sub(mean).mul_(1 - self.beta1))
        square.add_(gradient.pow(2).sub_(square).mul_(1 - self.beta2))
        size = self.lr * math.sqrt(1 - self.beta2**number) / (1 - self.beta1**number)
        return rows + -size * mean.div(square.sqrt().add_(_ADAM_EPSILON))


@dataclass
class Decayed(RowOptimizer):
    """An optimizer that multiplies the row by `factor` before its step: decoupled weight decay (Loshchilov and Hutter,
    ICLR 2019). It is lazy, since a row without a gradient has no step."""

    optimizer: RowOptimizer
    factor: float

    def __post_init__(self) -> None:
        self.state_names, self.is_rowwise = self.optimizer.state_names, self.optimizer.is_rowwise

    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], number: int
    ) -> torch.Tensor:
        return self.optimizer.step(rows * self.factor, gradient, state, number)


def state_width(optimizer: RowOptimizer, width: int) -> int:
    """Return how many numbers each part of the state has for a row of `width` numbers."""
    return 1 if optimizer.is_rowwise else width


def row_optimizers(config: TrainingConfig, names: Iterable[str]) -> dict[str, RowOptimizer]:
    """Return the optimizer of each of these tables, which are all tables of the model. Raises ConfigError (see
    `settings_of_tables` and `row_optimizer`)."""
    return {
        name: row_optimizer(config.optimizer) if settings.optimizer is None else _of_kind(settings.optimizer)
        for name, settings in settings_of_tables(config.tables, names).items()
    }


def _of_kind(config: AnyRowOptimizerConfig | SgdConfig | AdamConfig | AdagradConfig) -> RowOptimizer:
    optimizer: RowOptimizer
    match config:
        case RowSgdConfig() | SgdConfig():
            optimizer = RowSgd(config.lr)
        case RowAdamConfig() | AdamConfig():
            optimizer = LazyAdam(config.lr, config.beta1, config.beta2)
        case RowAdagradConfig() | AdagradConfig():
            optimizer = RowAdagrad(config.lr, config.initial_accumulator)
        case RowwiseAdagradConfig():
            optimizer = RowwiseAdagrad(config.lr, config.initial_accumulator)
        case _:
            assert_never(config)
    return Decayed(optimizer, 1 - config.lr * config.weight_decay) if config.weight_decay else optimizer


def row_optimizer(config: OptimizerConfig) -> RowOptimizer:
    """Return the optimizer for tables that `training.tables` does not name, as given by `training.optimizer`. Raises
    ConfigError if this optimizer would change rows that no sample has used."""
    if isinstance(config, TorchConfig):
        raise ConfigError(
            "training.optimizer.class: expected sgd, adam or adagrad for a model with tables (sparse embeddings), got "
            f"{config.cls}: a step changes rows of a table one by one; give the tables an optimizer of their own "
            "(training.tables)"
        )
    moved = "a step would move rows that no sample of it uses: all rows of a table would have to be changed"
    if config.weight_decay:
        raise ConfigError(
            f"training.optimizer.weight_decay: expected 0 for a model with tables (sparse embeddings), got "
            f"{config.weight_decay}: {moved}; give the tables an optimizer of their own with a lazy weight_decay "
            "(training.tables), or put a penalty on the rows in use into the task's loss"
        )
    if isinstance(config, SgdConfig | AdagradConfig) and config.momentum:
        raise ConfigError(
            f"training.optimizer.momentum: expected 0 for a model with tables (sparse embeddings), got "
            f"{config.momentum}: {moved}; use adam, which is lazy for tables"
        )
    return _of_kind(config)
