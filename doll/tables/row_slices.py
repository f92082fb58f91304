"""The rows of a table that each shard of a parameter server holds (`ps.shards`). Pure.

Shard k of S has the rows k, k + S, k + 2 S, ... of every table, and numbers them 0, 1, 2, ... Blobs of a shard name
rows by these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from doll.tables.rows import Floats, Ids, Patch, Rows, TableShape, checksum_of


class RowSlice(NamedTuple):
    """The rows of shard `shard` of `shards`."""

    shard: int
    shards: int

    def shape(self, shape: TableShape) -> TableShape:
        """Return the shape of this part of a table of shape `shape`."""
        return shape._replace(num_rows=len(range(self.shard, shape.num_rows, self.shards)))

    def shapes(self, shapes: Mapping[str, TableShape]) -> Mapping[str, TableShape]:
        return shapes if self.shards == 1 else {name: self.shape(shape) for name, shape in shapes.items()}

    def has(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that the shard has."""
        is_here: npt.NDArray[np.bool_] = ids % self.shards == self.shard
        return is_here

    def numbers(self, ids: Ids) -> Ids:
        """Return the shard's numbers of those rows of `ids` that it has."""
        return ids[self.has(ids)] // self.shards

    def ids(self, numbers: Ids) -> Ids:
        """Return the ids of the rows with these numbers."""
        return numbers * self.shards + self.shard

    def part(self, rows: Rows) -> Rows:
        """Return the shard's part of `rows`."""
        is_here = self.has(rows.ids)
        return Rows(rows.ids[is_here] // self.shards, rows.values[is_here])

    def parts(self, rows: Mapping[str, Rows]) -> Mapping[str, Rows]:
        """Return the shard's part of a contribution, by table. It names each table of which a shard has a row, so that
        all shards count the same steps."""
        if self.shards == 1:
            return rows
        return {name: self.part(of_table) for name, of_table in rows.items() if len(of_table.ids)}

    def values(self, values: Floats) -> Floats:
        """Return a copy of the shard's rows of a table, shape (num_rows, width)."""
        return values[self.shard :: self.shards].copy()


def row_slices(shards: int) -> list[RowSlice]:
    return [RowSlice(shard, shards) for shard in range(shards)]


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """Return rows of one table from those of all shards, in the shards' order."""
    if len(parts) == 1:
        return parts[0]
    ids = np.concatenate([part.ids(rows.ids) for part, rows in zip(row_slices(len(parts)), parts, strict=True)])
    order = np.argsort(ids)
    return Rows(ids[order], np.concatenate([rows.values for rows in parts])[order])


def with_ids(patch: Patch | None, part: RowSlice, width: int) -> Patch:
    """Return a patch of a shard with the ids of the table. None: the shard knows of no row that the receiver has."""
    if patch is None:
        none = np.empty((0, width), np.float32)
        return Patch(np.empty(0, np.int64), none.astype(np.bool_), none.reshape(-1), checksum_of(none))
    return patch._replace(ids=part.ids(patch.ids))
