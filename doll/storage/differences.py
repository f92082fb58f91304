"""Differential checkpoints: only the rows of tables that have changed since a whole checkpoint, the *base*. Pure.

All other tensors are whole in every checkpoint. Eisenman et al., "Check-N-Run" (NSDI 2022): most rows of an embedding
table do not change between two checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Tensors = Mapping[str, npt.NDArray[Any]]
Make = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]

MAX_DIFFERENCES: Final = 100
MIN_BASE_BYTES: Final = 1 << 20  # a smaller checkpoint is always whole: it costs little
_ROWS: Final = "changed rows {}"  # no tensor of a model has such a name

_Count = Annotated[int, msgspec.Meta(ge=0)]


class ChangedRows(NamedTuple):
    """The rows of a tensor that have changed.

    Attributes:
        rows: int64, shape (n,): distinct indices. A row that is new since then is one of them.
        size: number of elements of a row; the tensor is a sequence of such rows.
    """

    rows: npt.NDArray[np.int64]
    size: int


RowChanges = Callable[[int], Mapping[str, ChangedRows]]
"""Returns which rows have changed after a version, for each tensor with rows, by name. Any thread may call it."""


class BaseReference(msgspec.Struct, frozen=True):
    """The whole checkpoint, of the same term, to which a differential one refers. `digest`: its SHA-256."""

    version: _Count
    digest: bytes


class Patch(msgspec.Struct, frozen=True):
    """How a tensor is made: from the tensor of the base, and the rows that have changed.

    Attributes:
        shape: shape of the tensor.
        rows: name of the tensor that contains the indices of the changed rows.
    """

    shape: tuple[_Count, ...]
    rows: str


class Base:
    """The newest whole checkpoint that this process has saved, and the rule for the next whole one.

    A whole checkpoint is due when the differences to this one have together as many bytes as this one. If all updates
    change equally many rows, this number of differences is the one with the fewest bytes per checkpoint. It is also due
    after `MAX_DIFFERENCES`.
    """

    def __init__(self, term: int, reference: BaseReference, num_bytes: int) -> None:
        self.term = term
        self.reference = reference
        self._num_bytes = num_bytes
        self._num_differences = 0
        self._difference_bytes = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.term, self.reference.version

    def is_worth(self, difference_bytes: int) -> bool:
        """Return whether a difference of this size is to be written instead of a whole checkpoint."""
        total = self._difference_bytes + difference_bytes
        is_due = self._num_differences >= MAX_DIFFERENCES or total > self._num_bytes
        return self._num_bytes >= MIN_BASE_BYTES and not is_due

    def note_difference(self, num_bytes: int) -> None:
        self._num_differences += 1
        self._difference_bytes += num_bytes


def difference_bytes(tensors: Tensors, changed: Mapping[str, ChangedRows]) -> int:
    """Return the size of the tensors that `difference` would return."""
    indices = {id(rows): rows.nbytes for rows, _ in changed.values()}
    parts = (
        len(changed[name].rows) * changed[name].size * tensor.itemsize if name in changed else tensor.nbytes
        for name, tensor in tensors.items()
    )
    return sum(parts) + sum(indices.values())


def difference(tensors: Tensors, changed: Mapping[str, ChangedRows]) -> tuple[dict[str, Any], dict[str, Patch]]:
    """Return the tensors of a differential checkpoint, and its patches by name of the tensor."""
    made, patches = dict(tensors), dict[str, Patch]()
    names: dict[int, str] = {}  # tensors of the same table share an array of indices
    for name, (rows, size) in changed.items():
        index = names.setdefault(id(rows), _ROWS.format(len(names)))
        patches[name] = Patch(tensors[name].shape, index)
        made[name], made[index] = tensors[name].reshape(-1, size)[rows], rows
    return made, patches


def patched(stored: Tensors, patches: Mapping[str, Patch], base: Tensors, *, make: Make) -> dict[str, Any]:
    """Return the whole tensors of a differential checkpoint.

    Args:
        stored: tensors of the differential checkpoint.
        base: tensors of the whole one. Those that are writable are changed, and returned.
        make: makes a tensor of zeros, for one that has more rows than in the base.

    Raises:
        ValueError, KeyError: the parts do not fit.
    """
    indices = {patch.rows for patch in patches.values()}
    tensors = {name: tensor for name, tensor in stored.items() if name not in indices}
    for name, patch in patches.items():
        tensors[name] = _patched(name, patch.shape, base[name], stored[patch.rows], stored[name], make)
    return tensors


def _patched(
    name: str, shape: tuple[int, ...], old: npt.NDArray[Any], rows: npt.NDArray[Any], new: npt.NDArray[Any], make: Make
) -> npt.NDArray[Any]:
    if rows.dtype != np.int64 or rows.ndim != 1 or new.ndim != 2 or len(new) != len(rows) or not new.shape[1]:
        raise ValueError(f"{name}: expected an index for each changed row, got {rows.shape} for {new.shape}")
    size = new.shape[1]
    num_before, num_rows = old.size // size, math.prod(shape) // size
    is_new = rows >= num_before
    fits = old.dtype == new.dtype and num_rows * size == math.prod(shape) and num_before * size == old.size
    if not (fits and rows.min(initial=0) >= 0 and rows.max(initial=0) < max(num_rows, 1)):
        raise ValueError(f"{name}: the changed rows do not fit shape {shape} and {old.shape} in the base")
    if max(num_rows - num_before, 0) != np.count_nonzero(is_new):
        raise ValueError(f"{name}: expected all rows from {num_before} to {num_rows} among the changed ones")
    if old.shape == shape and old.flags.writeable:
        made = old
    else:
        made = make(shape, old.dtype)
        made.reshape(-1)[: min(old.size, made.size)] = old.reshape(-1)[: made.size]
    made.reshape(-1, size)[rows] = new
    return made
