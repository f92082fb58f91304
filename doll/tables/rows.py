"""Some rows of a table, and the sum of several sets of rows in a fixed order. Pure.

A *table* is a parameter of shape (num_rows, width) that is too large to be sent as a whole: an embedding, the weights
of hashed features, counts. Only the rows that a batch uses are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

T = TypeVar("T", bound=np.generic)
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
CHUNK: Final = 4096  # consecutive numbers of a vector; sparse rounds send the largest of each chunk
# Function from a table's name and strictly increasing ids to a copy of the rows, float32, shape (n, width).
LookUp: TypeAlias = Callable[[str, Ids], Floats]


class TableShape(NamedTuple):
    """The shape of a table: rows are numbered 0 .. num_rows - 1, and each row has `width` float32 values."""

    num_rows: int
    width: int

    def problem(self, ids: Ids) -> str:
        """Return why `ids` cannot be rows of this table in this order; "" if they can."""
        if not (isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1):
            return "expected ids as an int64 array of one dimension"
        if len(ids) and not (ids[0] >= 0 and ids[-1] < self.num_rows and (np.diff(ids) > 0).all()):
            return f"expected strictly increasing ids of 0 to {self.num_rows - 1}"
        return ""


class Rows(NamedTuple):
    """Some rows of one table.

    Attributes:
        ids: int64, shape (n,), strictly increasing.
        values: float32, shape (n, width).
    """

    ids: Ids
    values: Floats


class Patch(NamedTuple):
    """The current values of some numbers in rows of one table. The receiver has the rows' other numbers already.

    Attributes:
        ids: int64, shape (n,), strictly increasing.
        is_there: bool, shape (n, width): True for each number in the patch.
        values: float32, shape (k,), in the order of rows and columns.
        checksum: CRC-32 of the current rows that the receiver knows (`checksum_of`), to verify the receiver's rows.
    """

    ids: Ids
    is_there: npt.NDArray[np.bool_]
    values: Floats
    checksum: int


def checksum_of(rows: Floats) -> int:
    """Return the CRC-32 of these rows, shape (n, width)."""
    return crc32(np.ascontiguousarray(rows, "<f4").reshape(-1).view(np.uint8).data)


def grown(array: npt.NDArray[T], num_rows: int) -> npt.NDArray[T]:
    """Return a copy of `array` with `num_rows` rows, of which the new ones are zero."""
    larger: npt.NDArray[T] = np.zeros((num_rows, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


def no_rows(width: int) -> Rows:
    """Return an empty set of rows of a table of this width."""
    return Rows(np.empty(0, np.int64), np.empty((0, width), np.float32))


def add_in_order(pieces: Sequence[Rows]) -> Rows:
    """Return the sum of one or more sets of rows of one table. Each row is added in float32, in the order of `pieces`.

    A single set is returned without a copy. The result depends only on the sets and their order, bit for bit.

    Raises:
        ValueError: `pieces` is empty.
    """
    if not pieces:
        raise ValueError("expected at least one piece, got none")
    if len(pieces) == 1:
        return pieces[0]
    ids = np.sort(np.concatenate([piece.ids for piece in pieces]))
    ids = ids[np.diff(ids, prepend=-1) > 0]
    values = np.zeros((len(ids), pieces[0].values.shape[1]), np.float32)
    for piece in pieces:
        values[np.searchsorted(ids, piece.ids)] += piece.values  # ids are distinct within a piece
    return Rows(ids, values)


def add_where_equal(ids: Ids, values: Floats, other: Rows) -> None:
    """Add the rows of `other` to `values`, shape (n, width), in place, if their ids are in the increasing `ids`."""
    is_in, at = found(ids, other.ids)
    values[is_in] += other.values[at]


def write_where_equal(ids: Ids, values: Floats, other: Rows) -> npt.NDArray[np.bool_]:
    """Replace the rows in `values`, shape (n, width), whose ids are also in `other`. Return a mask of these rows."""
    is_in, at = found(ids, other.ids)
    values[is_in] = other.values[at]
    return is_in


def found(ids: Ids, known: Ids) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Return a mask of the `ids` that are in `known`, which is strictly increasing, and the index of each of them
    there."""
    if not len(known):
        return np.zeros(len(ids), np.bool_), np.empty(0, np.int64)
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    is_in: npt.NDArray[np.bool_] = known[at] == ids
    return is_in, at[is_in]
