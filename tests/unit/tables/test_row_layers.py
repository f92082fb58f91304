"""Changed rows of one version after another, none of which changes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from doll.tables.row_layers import NO_LAYERS, RowLayers
from doll.tables.rows import Rows
from fuzzing import seeds

IDS = np.arange(60)


def read(layers: RowLayers) -> list[float]:
    values = np.full((60, 2), -1, np.float32)
    layers.write_to(IDS, values)
    assert (values[:, 0] == values[:, 1]).all()
    return values[:, 0].tolist()


@pytest.mark.parametrize("seed", seeds(20))
def test_each_version_has_its_rows_for_as_long_as_it_is_held(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, expected = NO_LAYERS, [-1.0] * 60
    versions = [(layers, expected)]
    for version in range(1, 40):
        ids = np.sort(rng.choice(IDS, rng.integers(0, rng.choice([2, 60])), replace=False))
        rows = Rows(ids, np.full((len(ids), 2), version, np.float32))
        layers = layers.with_rows(rows, version)
        rows.values[:] = -7  # it was copied
        expected = [float(version) if at in ids else value for at, value in enumerate(expected)]
        versions.append((layers, expected))
        sizes = [len(layer.ids) for layer in layers.layers]
        assert all(below > 2 * above for below, above in pairwise(sizes))
        assert layers.num_bytes <= 2 * 60 * (8 + 8 + 8)
    for held, rows_of_it in versions:
        assert read(held) == rows_of_it


def test_what_a_checkpoint_has_is_left_out() -> None:
    layers = NO_LAYERS
    for version, ids in ((1, [1, 2, 3]), (2, [2]), (3, [3, 50])):
        layers = layers.with_rows(Rows(np.array(ids), np.full((len(ids), 2), version, np.float32)), version)
    later = read(layers.after(2))
    assert (later[1], later[2], later[3], later[50]) == (-1, -1, 3, 3)
    assert layers.after(3) == NO_LAYERS
    assert read(layers)[1:4] == [1, 2, 3]
