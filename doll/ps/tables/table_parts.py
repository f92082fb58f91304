"""The common parts of tables of every kind at the server: answers, sums of gradients, their tensors in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.errors import CheckpointError
from doll.optim.optimizer import DivergedError
from doll.tables.rows import Floats, Patch, Rows

# As in `doll.optim.optimizer`: many finite numbers whose mean is finite never add up to an infinite one.
SUM_FACTOR: Final = 2.0**-16


class RowAnswer(NamedTuple):
    """The answer to a request for rows of one table."""

    rows: Rows  # whole
    patch: Patch | None = None  # what else has changed in rows that are known; None: `rows` is all


def check_finite(rows: Floats, table: str, what: str) -> None:
    """
    Raises:
        DivergedError: a number of these rows of `table` is not finite.
    """
    if not np.isfinite(rows).all():
        raise DivergedError(
            f"after the step the {what} of table {table!r} are not finite (NaN or infinity): expected a model "
            "that converges; lower the learning rate (training.optimizer.lr, or that of training.tables), set "
            "training.clip_norm, or look for extreme values in the stream; the last checkpoint is intact"
        )


def tensor_name(table: str, part: str) -> str:
    """The name of a tensor in a checkpoint."""
    return f"table.{table}.{part}"


def stored_tensor(
    tensors: Mapping[str, npt.NDArray[Any]], table: str, part: str, shape: tuple[int, ...] | None
) -> npt.NDArray[Any]:
    """The array of this part of `table` in a checkpoint; `shape`: None: any.

    Raises:
        CheckpointError: it is missing, or of another shape.
    """
    name = tensor_name(table, part)
    array = tensors.get(name)
    if array is None or (shape is not None and array.shape != tuple(shape)):
        got = "nothing" if array is None else f"shape {array.shape}"
        raise CheckpointError(f"{name}: expected {'a tensor' if shape is None else f'shape {tuple(shape)}'}, got {got}")
    return array
