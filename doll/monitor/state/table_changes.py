"""The rows of tables that differ between two versions. Pure.

Tables are read in the form of checkpoints (`doll.ps.tables`): `table.NAME.values` contains the rows. For a bounded
table, `table.NAME.ids` contains the id of each row; a negative id marks a free place.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from doll.tables.rows import Floats, Ids, Rows

Tensors = Mapping[str, npt.NDArray[Any]]

_PREFIX, _VALUES, _IDS = "table.", ".values", ".ids"
_TOP: Final = 5
_CHUNK: Final = 65_536  # rows that are subtracted together


@dataclass(frozen=True, kw_only=True)
class TableChange:
    """The changes of one table, from an earlier version to a later one.

    Attributes:
        rows: number of rows that both versions have.
        changed: number of these rows in which at least one value differs.
        new, gone: number of rows that only the later, or only the earlier version has.
        largest: largest absolute difference of a value in a common row.
        most: ids of the rows with the longest differences, and these lengths, the longest first.
    """

    rows: int
    changed: int
    new: int
    gone: int
    largest: float
    most: tuple[tuple[int, float], ...]


def table_changes(a: Tensors, b: Tensors) -> dict[str, TableChange]:
    """Return the changes of each table of these checkpoints, by name. If the rows of a table have another width in `b`,
    all its rows count as gone and new."""
    before, after = _tables(a), _tables(b)
    nothing = Rows(np.zeros(0, np.int64), np.zeros((0, 0), np.float32))
    return {
        name: _change(before.get(name, nothing), after.get(name, nothing))
        for name in sorted(before.keys() | after.keys())
    }


def _tables(tensors: Tensors) -> dict[str, Rows]:
    tables = {}
    for key, values in tensors.items():
        if key.startswith(_PREFIX) and key.endswith(_VALUES) and values.ndim == 2:
            name = key[len(_PREFIX) : -len(_VALUES)]
            tables[name] = _rows(tensors.get(f"{_PREFIX}{name}{_IDS}"), values)
    return tables


def _rows(ids: Ids | None, values: Floats) -> Rows:
    if ids is None or ids.shape != (len(values),):
        return Rows(np.arange(len(values), dtype=np.int64), values)
    order = np.argsort(ids, kind="stable")
    order = order[np.count_nonzero(ids < 0) :]
    return Rows(ids[order], values[order])


def _change(a: Rows, b: Rows) -> TableChange:
    if a.values.shape[1] != b.values.shape[1]:
        return TableChange(rows=0, changed=0, new=len(b.ids), gone=len(a.ids), largest=0.0, most=())
    ids, in_a, in_b = np.intersect1d(a.ids, b.ids, assume_unique=True, return_indices=True)
    changed, largest, most = 0, 0.0, list[tuple[float, int]]()
    for begin in range(0, len(ids), _CHUNK):
        chunk = slice(begin, begin + _CHUNK)
        x, y = a.values[in_a[chunk]], b.values[in_b[chunk]]
        differs = (x != y).any(axis=1)
        changed += int(differs.sum())
        step = np.subtract(y[differs], x[differs], dtype=np.float64)
        largest = max(largest, float(np.abs(step).max(initial=0.0)))
        lengths = np.linalg.norm(step, axis=1)
        furthest = np.argsort(-lengths, kind="stable")[:_TOP]
        # The lower id first if two lengths are equal.
        furthest_here = zip(lengths[furthest].tolist(), (-ids[chunk][differs][furthest]).tolist(), strict=True)
        most = heapq.nlargest(_TOP, [*most, *furthest_here])
    return TableChange(
        rows=len(ids), changed=changed, new=len(b.ids) - len(ids), gone=len(a.ids) - len(ids), largest=largest,
        most=tuple((-number, length) for length, number in most),
    )  # fmt: skip
