"""`training.tables`: the optimizers of rows of tables (embeddings with sparse=True), and limits of bounded tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from doll.config.section import Section
from doll.config.variants import Variants
from doll.errors import ConfigError


class RowOptimizerConfig(Section):
    """The keys that the optimizers of rows have in common."""

    weight_decay: float = Field(default=0.0, ge=0)
    """decoupled and lazy weight decay: a row with a gradient in an update is multiplied by 1 - lr * weight_decay before
    its step; other rows do not change"""


class RowSgdConfig(RowOptimizerConfig):
    """Stochastic gradient descent on rows."""

    name: Literal["sgd"] = "sgd"
    lr: PositiveFloat = 0.1


class RowAdamConfig(RowOptimizerConfig):
    """Lazy Adam: the moments of a row change only if the row has a gradient, as in torch's SparseAdam."""

    name: Literal["adam"] = "adam"
    lr: PositiveFloat = 1e-3
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)


class RowAdagradConfig(RowOptimizerConfig):
    """Adagrad on rows: each number has its own learning rate."""

    name: Literal["adagrad"] = "adagrad"
    lr: PositiveFloat = 0.1
    initial_accumulator: float = Field(default=0.0, ge=0)
    """initial value of a number's sum of squared gradients"""


class RowwiseAdagradConfig(RowOptimizerConfig):
    """Adagrad with one number of state for each row: the sum of the means of its squared gradients (Mudigere et al.,
    2021)."""

    name: Literal["rowwise_adagrad"] = "rowwise_adagrad"
    lr: PositiveFloat = 0.1
    initial_accumulator: float = Field(default=0.0, ge=0)
    """initial value of a row's sum"""


row_optimizers = Variants("name", RowSgdConfig, RowAdamConfig, RowAdagradConfig, RowwiseAdagradConfig)

AnyRowOptimizerConfig = Annotated[
    RowSgdConfig | RowAdamConfig | RowAdagradConfig | RowwiseAdagradConfig, row_optimizers
]


class TableConfig(Section):
    """Settings of the tables whose names match this regular expression (re.search), but no earlier one in the list."""

    optimizer: AnyRowOptimizerConfig | None = None
    """optimizer of the rows; default: the settings of training.optimizer"""
    max_rows: int | None = Field(default=None, ge=1, le=2**30)
    """maximum number of ids that have rows at the same time, in a table of a doll.BoundedEmbedding, which needs this
    key. If there is no room, the least used ids lose their rows"""
    min_count: int = Field(default=1, ge=1, le=255)
    """an id gets a row after this number of applied pushes has named it; until then, reads return its initial row"""
    ttl_updates: PositiveInt | None = None
    """an id that no push names for more than this number of updates loses its row; default: never"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.max_rows is None and (self.min_count > 1 or self.ttl_updates is not None):
            key = "min_count" if self.min_count > 1 else "ttl_updates"
            raise ValueError(f"{key}: expected max_rows beside it: ids of a bounded table alone get and lose rows")
        return self


def settings_of_tables(tables: Mapping[str, TableConfig], names: Iterable[str]) -> dict[str, TableConfig]:
    """Return the settings of `training.tables` for each of the tables `names`, which must be all tables of the model.
    Raise ConfigError if an entry of `tables` applies to no table."""
    settings, unused = {}, dict.fromkeys(tables)
    for name in names:
        pattern = next((pattern for pattern in tables if re.search(pattern, name)), None)
        settings[name] = TableConfig() if pattern is None else tables[pattern]
        unused.pop(pattern or "", None)
    if unused:
        raise ConfigError(
            f"training.tables: expected regular expressions that are found in the name of a table and are the first "
            f"that are, got {', '.join(map(repr, unused))}; the model's tables (embeddings with sparse=True) are: "
            f"{', '.join(map(repr, settings)) or 'none'}"
        )
    return settings
