"""The rows of one table that have changed since a checkpoint, for one version after another. Pure.

The layers of a version never change. The next version has the same layers and a new one with the rows that it changes.
Before the new layer is added, it is merged with the layer below, into a copy, as long as the layer below is at most
twice as large. The earlier version keeps its own layers. So there are few layers, and few copies of each row.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.tables.rows import Floats, Ids, Rows, write_where_equal


class _Layer(NamedTuple):
    ids: Ids  # strictly increasing
    values: Floats
    versions: npt.NDArray[np.int64]  # version of each row's last change

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes + self.values.nbytes + self.versions.nbytes

    def where(self, is_kept: npt.NDArray[np.bool_]) -> _Layer:
        return _Layer(self.ids[is_kept], self.values[is_kept], self.versions[is_kept])


class RowLayers(NamedTuple):
    """The changed rows of one version. If several layers have a row, the last one counts."""

    layers: tuple[_Layer, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    def with_rows(self, rows: Rows, version: int) -> RowLayers:
        """Return the layers with a copy of `rows`, which are the rows of `version`, a later version."""
        if not len(rows.ids):
            return self
        new = _Layer(rows.ids.copy(), rows.values.copy(), np.full(len(rows.ids), version, np.int64))
        layers = list(self.layers)
        while layers and 2 * len(new.ids) >= len(layers[-1].ids):
            new = _merged(layers.pop(), new)
        return RowLayers((*layers, new))

    def after(self, version: int) -> RowLayers:
        """Return the layers without the rows that a checkpoint of `version` contains."""
        layers = []
        for layer in self.layers:
            is_later = layer.versions > version
            if is_later.any():
                layers.append(layer.where(is_later))
        return RowLayers(tuple(layers))

    def write_to(self, ids: Ids, values: Floats) -> None:
        """Overwrite the rows in `values`, shape (n, width), of those `ids` that have a row here."""
        for layer in self.layers:
            write_where_equal(ids, values, Rows(layer.ids, layer.values))


NO_LAYERS: Final = RowLayers()


def _merged(old: _Layer, new: _Layer) -> _Layer:
    is_same = np.isin(old.ids, new.ids, assume_unique=True)
    old = old.where(~is_same)
    ids = np.concatenate([old.ids, new.ids])
    order = np.argsort(ids, kind="stable")  # merges the two sorted parts
    values = np.concatenate([old.values, new.values])[order]
    return _Layer(ids[order], values, np.concatenate([old.versions, new.versions])[order])
