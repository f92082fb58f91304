"""scikit-learn's handwritten digits, split once and for all: some originals feed streams, the others are held out."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.producers.sources import images

HELD_OUT: Final = 360  # originals, a fifth of 1797
_SPLIT_SEED: Final = 20_230_801  # part of the data: another value would mix streams and held-out sets of older runs


class Originals(NamedTuple):
    """Untransformed digits: (n, 8, 8) grey values 0..255 and (n,) classes 0..9."""

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]


@cache
def originals() -> tuple[Originals, Originals]:
    """(for streams, held out). No original is in both. Do not write to the arrays."""
    table = _load()
    # RandomState's stream never changes; Generator's may change with numpy, and the split with it.
    order = np.random.RandomState(_SPLIT_SEED).permutation(len(table))
    images = np.rint(table[order, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = table[order, -1].astype(np.uint8)
    images.flags.writeable = labels.flags.writeable = False
    return Originals(images[HELD_OUT:], labels[HELD_OUT:]), Originals(images[:HELD_OUT], labels[:HELD_OUT])


def holdout(count: int, seed: int) -> Originals:
    """`count` held-out digits under random transforms: the stream's distribution, from originals that no stream has."""
    return Originals(*images.draw(*originals()[1], count, np.random.default_rng(seed)))


def _load() -> npt.NDArray[np.float64]:
    """(1797, 65): 64 grey values 0..16, then the class."""
    spec = importlib.util.find_spec("sklearn")
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():  # spares 2 s of CPU: importing sklearn pulls in all of scipy
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    data = load_digits()
    return np.column_stack([data.data, data.target])
