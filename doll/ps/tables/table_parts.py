"""The common parts of all tables at the server: rows, optimizer state, and the arrays of both in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from doll.errors import CheckpointError
from doll.optim.optimizer import DivergedError
from doll.optim.row_optimizer import RowOptimizer, state_width
from doll.ps.tables.row_array import RowArray
from doll.tables.checkpointed import VALUES, tensor_name
from doll.tables.rows import Floats, Ids, Patch, Rows, add_in_order

# The sum is scaled, as in `doll.optim.optimizer`, so that it cannot become infinite if the mean is finite.
_SUM_FACTOR: Final = 2.0**-16


class RowAnswer(NamedTuple):
    """The answer to a request for rows of one table."""

    rows: Rows  # whole rows
    patch: Patch | None = None  # changed numbers in known rows; None: `rows` contains all changes


class PendingRows(NamedTuple):
    """A contribution that waits for its update."""

    rows: Rows
    number: int  # number of its set


class StoredTable:
    """The rows of one table, the optimizer's state of some of them, and contributions to the next update. Not
    thread-safe; the arrays of `tensors` may be used in any thread."""

    def __init__(
        self, name: str, values: Floats, optimizer: RowOptimizer | None, *, counts_empty: bool = False
    ) -> None:  # fmt: skip
        """
        Args:
            values: float32, shape (number of rows, width). The table owns this memory from now on.
            optimizer: optimizer of the rows. None: contributions are steps, which are added.
            counts_empty: whether a contribution without rows counts as a step: of a shard, for which another shard has
                the rows.
        """
        self.name = name
        self._counts_empty = counts_empty
        self._values = RowArray(values)
        self._optimizer = optimizer
        self._state: dict[str, RowArray] = {}
        if optimizer is not None:
            width = state_width(optimizer, self._values.width)
            self._state = {part: RowArray(np.zeros((0, width), np.float32)) for part in optimizer.state_names}
        self._num_steps = 0
        self._version = 0  # version of the last change
        self._pending: list[PendingRows] = []
        self._sum: Rows | None = None  # sum of `_pending`, if it has been computed
        self._factor = 1.0 if optimizer is None else _SUM_FACTOR

    def add(self, rows: Rows, number: int = 0) -> None:
        """Add a contribution of the set with this number to the next update, after earlier contributions. Its memory is
        not used afterwards."""
        if len(rows.ids) or self._counts_empty:
            self._pending.append(PendingRows(Rows(rows.ids, rows.values * np.float32(self._factor)), number))
            self._sum = None

    def square_norm(self) -> float:
        """Return the sum of the squares of the summed contributions; for `training.clip_norm`."""
        if not self._pending:
            return 0.0
        self._sum = add_in_order([pending.rows for pending in self._pending])
        return float(np.square(self._sum.values, dtype=np.float64).sum()) / self._factor**2

    def _take_sum(self) -> Rows:
        """Return the sum of the waiting contributions, and forget them. At least one contribution must be waiting."""
        total = self._sum or add_in_order([pending.rows for pending in self._pending])
        self._pending, self._sum = [], None
        return total

    def _step(self, rows: Ids, slots: Ids, total: Floats, scale: float, lr_factor: float) -> None:
        """Make `lr_factor` times one step of the optimizer with `scale` times the sum `total`.

        Args:
            rows, slots: indices of the values, and of the state.

        Raises:
            DivergedError: a number is not finite.
        """
        assert self._optimizer is not None
        self._num_steps += 1
        state = {part: array.read(slots) for part, array in self._state.items()}
        before = torch.from_numpy(self._values.read(rows))
        after = self._optimizer.step(
            before,
            torch.from_numpy(total).mul_(scale / self._factor),
            {part: torch.from_numpy(values) for part, values in state.items()},
            self._num_steps,
        )
        if lr_factor != 1:
            after = torch.lerp(before, after, lr_factor)
        self._write(rows, after.numpy())
        for part, values in state.items():
            check_finite(values, self.name, f"state {part!r}")
            self._state[part].write(slots, values)

    def _write(self, rows: Ids, values: Floats) -> None:
        check_finite(values, self.name, "values")
        self._values.write(rows, values)

    def _parts(self) -> list[tuple[str, RowArray]]:
        """Return values and state with the names of their parts in a checkpoint."""
        return [(VALUES, self._values), *((f"state.{part}", array) for part, array in self._state.items())]

    def _held(self) -> dict[str, npt.NDArray[Any]]:
        return {part: array.hold() for part, array in self._parts()}

    def _replace(self, tensors: Mapping[str, npt.NDArray[Any]], values: Floats, num_states: int) -> None:
        """Replace the values, and load the state of `num_states` rows from a checkpoint."""
        state = {
            part: stored_tensor(tensors, self.name, f"state.{part}", (num_states, array.width))
            for part, array in self._state.items()
        }
        self._values.replace(values)
        for part, rows in state.items():
            self._state[part].replace(rows)
        self._pending, self._sum = [], None


def check_finite(rows: Floats, table: str, what: str) -> None:
    """Raise DivergedError if a number of these rows of `table` is not finite."""
    if not np.isfinite(rows).all():
        raise DivergedError(
            f"after the step the {what} of table {table!r} are not finite (NaN or infinity): expected a model "
            "that converges; lower the learning rate (training.optimizer.lr, or that of training.tables), set "
            "training.clip_norm, or look for extreme values in the stream; the last checkpoint is intact"
        )


def stored_tensor(
    tensors: Mapping[str, npt.NDArray[Any]], table: str, part: str, shape: tuple[int, ...] | None
) -> npt.NDArray[Any]:
    """Return the array of this part of `table` in a checkpoint. `shape`: expected shape; None: any. Raises
    CheckpointError if the array is missing, or of another shape."""
    name = tensor_name(table, part)
    array = tensors.get(name)
    if array is None or (shape is not None and array.shape != tuple(shape)):
        got = "nothing" if array is None else f"shape {array.shape}"
        raise CheckpointError(f"{name}: expected {'a tensor' if shape is None else f'shape {tuple(shape)}'}, got {got}")
    return array
