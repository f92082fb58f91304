"""Rows of one table that have changed since a checkpoint, as of one version after another. Pure.

What a version has is never changed: the next one is made beside it, with the same layers and one more. A layer is
merged with the one below it while that is not twice as large, so there are few layers, and a row is copied a few times
only.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.tables.rows import Floats, Ids, Rows


class _Layer(NamedTuple):
    ids: Ids  # strictly increasing
    values: Floats
    versions: npt.NDArray[np.int64]  # each row is that of this version, and has not changed before

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes + self.values.nbytes + self.versions.nbytes

    def where(self, is_kept: npt.NDArray[np.bool_]) -> _Layer:
        return _Layer(self.ids[is_kept], self.values[is_kept], self.versions[is_kept])


class RowLayers(NamedTuple):
    """Changed rows of one version; a later layer counts."""

    layers: tuple[_Layer, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    def with_rows(self, rows: Rows, version: int) -> RowLayers:
        """The layers with `rows`, which is copied, as these rows are in `version`, a later one."""
        if not len(rows.ids):
            return self
        new = _Layer(rows.ids.copy(), rows.values.copy(), np.full(len(rows.ids), version, np.int64))
        layers = list(self.layers)
        while layers and 2 * len(new.ids) >= len(layers[-1].ids):
            new = _merged(layers.pop(), new)
        return RowLayers((*layers, new))

    def after(self, version: int) -> RowLayers:
        """The layers without the rows that a checkpoint of `version` has as they are here."""
        layers = []
        for layer in self.layers:
            is_later = layer.versions > version
            if is_later.any():
                layers.append(layer.where(is_later))
        return RowLayers(tuple(layers))

    def write_to(self, ids: Ids, values: Floats) -> None:
        """Replace those of `values`, shape (n, width), the rows `ids`, that are here."""
        for layer in self.layers:
            at = np.minimum(np.searchsorted(layer.ids, ids), len(layer.ids) - 1)
            is_here = layer.ids[at] == ids
            values[is_here] = layer.values[at[is_here]]


NO_LAYERS: Final = RowLayers()


def _merged(old: _Layer, new: _Layer) -> _Layer:
    is_same = np.isin(old.ids, new.ids, assume_unique=True)
    old = old.where(~is_same)
    ids = np.concatenate([old.ids, new.ids])
    order = np.argsort(ids, kind="stable")  # merges what is sorted
    values = np.concatenate([old.values, new.values])[order]
    return _Layer(ids[order], values, np.concatenate([old.versions, new.versions])[order])
