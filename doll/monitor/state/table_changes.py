"""The rows of tables that differ between two versions. Pure.

Tables are read as they are in checkpoints (`doll.ps.tables`): `table.NAME.values` has the rows, and of a bounded table
`table.NAME.ids` says which id each row is of; a negative one is of a free place.
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
_CHUNK: Final = 65_536  # rows that are subtracted at once


@dataclass(frozen=True, kw_only=True)
class TableChange:
    """The changes of one table, from an earlier version to a later one.

    Attributes:
        rows: that both have.
        changed: of these, rows of which at least one number is another one.
        new, gone: rows that only the later, or only the earlier one has.
        largest: by how much a number of a row that both have differs, at most.
        most: ids of the rows that have moved furthest, and the lengths of their differences, the largest first.
    """

    rows: int
    changed: int
    new: int
    gone: int
    largest: float
    most: tuple[tuple[int, float], ...]


def table_changes(a: Tensors, b: Tensors) -> dict[str, TableChange]:
    """The changes by the name of each table of one of these checkpoints. Tables whose rows have another width in `b`
    are other tables: all rows are gone, and all are new."""
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
        # The lower id first if two have moved as far.
        furthest_here = zip(lengths[furthest].tolist(), (-ids[chunk][differs][furthest]).tolist(), strict=True)
        most = heapq.nlargest(_TOP, [*most, *furthest_here])
    return TableChange(
        rows=len(ids), changed=changed, new=len(b.ids) - len(ids), gone=len(a.ids) - len(ids), largest=largest,
        most=tuple((-number, length) for length, number in most),
    )  # fmt: skip
