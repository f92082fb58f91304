"""`training.tables`: how the rows of tables (embeddings with sparse=True) are stepped."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from doll.config.section import Section
from doll.config.variants import Variants


class RowOptimizerConfig(Section):
    """What the optimizers of rows have in common."""

    weight_decay: float = Field(default=0.0, ge=0)
    """decoupled and lazy: a row that an update has a gradient of is multiplied by 1 - lr * weight_decay before its
    step; other rows stay as they are"""


class RowSgdConfig(RowOptimizerConfig):
    """Stochastic gradient descent on rows."""

    name: Literal["sgd"] = "sgd"
    lr: PositiveFloat = 0.1


class RowAdamConfig(RowOptimizerConfig):
    """Lazy Adam: the moments of a row move only with a gradient of that row, as those of torch's SparseAdam."""

    name: Literal["adam"] = "adam"
    lr: PositiveFloat = 1e-3
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)


class RowAdagradConfig(RowOptimizerConfig):
    """Adagrad on rows: each number has a rate of its own."""

    name: Literal["adagrad"] = "adagrad"
    lr: PositiveFloat = 0.1
    initial_accumulator: float = Field(default=0.0, ge=0)
    """what a number's sum of squared gradients begins with"""


class RowwiseAdagradConfig(RowOptimizerConfig):
    """Adagrad with one sum for each row: of the means of its squared gradients (Mudigere et al., 2021). The state of a
    row is one number."""

    name: Literal["rowwise_adagrad"] = "rowwise_adagrad"
    lr: PositiveFloat = 0.1
    initial_accumulator: float = Field(default=0.0, ge=0)
    """what a row's sum begins with"""


row_optimizers = Variants("name", RowSgdConfig, RowAdamConfig, RowAdagradConfig, RowwiseAdagradConfig)

AnyRowOptimizerConfig = Annotated[
    RowSgdConfig | RowAdamConfig | RowAdagradConfig | RowwiseAdagradConfig, row_optimizers
]


class TableConfig(Section):
    """Of the tables in whose name this regular expression is found (re.search) and none before it."""

    optimizer: AnyRowOptimizerConfig | None = None
    """of the rows; default: what training.optimizer says"""
