"""Handwritten digits, split once and for all: some originals feed streams, the others are held out.

`digits.zlib` is the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998; UCI Machine
Learning Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0), as scikit-learn orders it.
"""

from __future__ import annotations

import zlib
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
    rows = table()
    # RandomState's stream never changes; Generator's may change with numpy, and the split with it.
    order = np.random.RandomState(_SPLIT_SEED).permutation(len(rows))
    images = np.rint(rows[order, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = rows[order, -1]
    images.flags.writeable = labels.flags.writeable = False
    return Originals(images[HELD_OUT:], labels[HELD_OUT:]), Originals(images[:HELD_OUT], labels[:HELD_OUT])


def holdout(count: int, seed: int) -> Originals:
    """`count` held-out digits under random transforms: the stream's distribution, from originals that no stream has."""
    return Originals(*images.draw(*originals()[1], count, np.random.default_rng(seed)))


def table() -> npt.NDArray[np.uint8]:
    """The 1797 originals as they were published, shape (1797, 65): 64 grey values of 0 to 16, then the class."""
    packed = Path(__file__).with_name("digits.zlib").read_bytes()
    return np.frombuffer(zlib.decompress(packed), np.uint8).reshape(-1, 65)
