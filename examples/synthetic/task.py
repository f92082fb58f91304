"""Gaussian classes from `source.py`, to try a set-up, a drift or a policy without any data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from doll import Sample, Task
from doll.errors import SampleError
from torch import nn


class Gaussian(Task):
    """Records have `features` little-endian float32 numbers, then the class as one float32.

    Args:
        features: number of features, as in the source.
        classes: number of classes, as in the source.
        hidden: widths of the hidden layers; empty: a linear model.
    """

    num_classes: int

    def __init__(self, features: int = 20, classes: int = 2, hidden: Sequence[int] = ()) -> None:
        if features < 1 or classes < 2 or not all(width > 0 for width in hidden):
            raise ValueError(f"expected features >= 1, classes >= 2, hidden > 0, got {features}, {classes}, {hidden}")
        self.input_shape = (features,)
        self.num_classes = classes
        self.hidden = tuple(hidden)

    def build_model(self) -> nn.Module:
        widths = (self._features, *self.hidden)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], self.num_classes))

    def decode(self, record: bytes) -> Sample:
        features = self._features
        if len(record) != 4 * (features + 1):
            raise SampleError(
                f"expected {4 * (features + 1)} bytes ({features} float32 features, then the class), got {len(record)}"
            )
        row = np.frombuffer(record, "<f4")
        finite = np.isfinite(row[:-1])
        if not finite.all():
            at = int(finite.argmin())
            raise SampleError(f"expected finite features, got {row[at]} at position {at}")
        if not _is_class(row[-1:], self.num_classes).all():
            raise SampleError(f"expected a class in 0..{self.num_classes - 1}, got {row[-1]}")
        return Sample(row[:-1].astype(np.float32), int(row[-1]))

    def decode_block(self, block: memoryview, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        features = self._features
        if width != 4 * (features + 1):
            return None
        rows = np.frombuffer(block, "<f4").reshape(-1, features + 1)
        x, y = rows[:, :-1], rows[:, -1]
        if not (np.isfinite(x).all() and _is_class(y, self.num_classes).all()):
            return None  # `decode` decodes record by record, and names the bad record and the reason
        return x.astype(np.float32), y.astype(np.int64)

    @property
    def _features(self) -> int:
        assert self.input_shape is not None
        return self.input_shape[0]


def _is_class(values: npt.NDArray[np.float32], classes: int) -> npt.NDArray[np.bool_]:
    # Every comparison with a NaN is false, so a NaN is refused.
    fits: npt.NDArray[np.bool_] = (values >= 0) & (values < classes) & (np.floor(values) == values)
    return fits
