"""One step of an optimizer on some rows of a table; the state of the other rows does not exist.

The arithmetic is that of torch's optimizers on sparse gradients: `SGD`, `Adagrad` and `SparseAdam` (lazy Adam: rows
without a gradient keep their moments as they are), to the bit: a test compares them. torch has no row-wise Adagrad.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, assert_never

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


class RowOptimizer(Protocol):
    """A step on rows. `state_names` are the parts of the state, zero at first."""

    @property
    def state_names(self) -> tuple[str, ...]: ...

    @property
    def is_rowwise(self) -> bool:
        """Each part of the state is one number for a row; else as many as the row has."""

    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], number: int
    ) -> torch.Tensor:
        """The rows after the step; `state` is changed in place.

        Args:
            rows, gradient: float32, shape (n, width).
            state: by name, float32, shape (n, `state_width`) each.
            number: of the table's step, from 1 on.
        """


@dataclass(frozen=True, slots=True)
class RowSgd:
    """Stochastic gradient descent."""

    lr: float
    state_names: ClassVar[tuple[str, ...]] = ()
    is_rowwise: ClassVar[bool] = False

    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], number: int
    ) -> torch.Tensor:
        return torch.add(rows, gradient, alpha=-self.lr)


@dataclass(frozen=True, slots=True)
class RowAdagrad:
    """Adagrad (Duchi, Hazan, Singer, JMLR 12, 2011), diagonal.

    Attributes:
        initial_accumulator: what each sum of squares begins with.
    """

    lr: float
    initial_accumulator: float = 0.0
    state_names: ClassVar[tuple[str, ...]] = ("sum",)
    is_rowwise: ClassVar[bool] = False

    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], number: int
    ) -> torch.Tensor:
        total = state[self.state_names[0]]
        if self.initial_accumulator:
            total.masked_fill_(total == 0, self.initial_accumulator)  # a sum that has begun is at least that
        squares = gradient.pow(2)
        total.add_(squares.mean(dim=1, keepdim=True) if self.is_rowwise else squares)
        return torch.add(rows, gradient / total.sqrt().add_(_ADAGRAD_EPSILON), alpha=-self.lr)


@dataclass(frozen=True, slots=True)
class RowwiseAdagrad(RowAdagrad):
    """Adagrad with one sum for each row, of the means of its squared gradients.

    Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation Models"
    (2021); as TorchRec's `RowWiseAdagrad`, whose epsilon is the same.
    """

    state_names: ClassVar[tuple[str, ...]] = ("row_sum",)
    is_rowwise: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class LazyAdam:
    """Adam whose moments of a row move only with a gradient of that row; their bias is corrected by the number of the
    table's steps, as in torch's `SparseAdam`."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    is_rowwise: ClassVar[bool] = False

    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], number: int
    ) -> torch.Tensor:
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.add_(gradient.sub(mean).mul_(1 - self.beta1))
        square.add_(gradient.pow(2).sub_(square).mul_(1 - self.beta2))
        size = self.lr * math.sqrt(1 - self.beta2**number) / (1 - self.beta1**number)
        return rows + -size * mean.div(square.sqrt().add_(_ADAM_EPSILON))


@dataclass(frozen=True, slots=True)
class Decayed:
    """An optimizer whose step begins with `factor` times the row: decoupled weight decay (Loshchilov and Hutter, ICLR
    2019), lazy, since a row without a gradient has no step."""

    optimizer: RowOptimizer
    factor: float

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.optimizer.state_names

    @property
    def is_rowwise(self) -> bool:
        return self.optimizer.is_rowwise

    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], number: int
    ) -> torch.Tensor:
        return self.optimizer.step(rows * self.factor, gradient, state, number)


def state_width(optimizer: RowOptimizer, width: int) -> int:
    """Numbers of each part of the state of a row of `width` numbers."""
    return 1 if optimizer.is_rowwise else width


def row_optimizers(config: TrainingConfig, names: Iterable[str]) -> dict[str, RowOptimizer]:
    """The optimizer of each of these tables, which are all of the model. Raises ConfigError (see `settings_of_tables`
    and `row_optimizer`)."""
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
    """The optimizer of tables that `training.optimizer` asks for, if `training.tables` names none. Raises ConfigError
    if it moves rows that no sample has used."""
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
