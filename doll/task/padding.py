"""Sequences of different lengths as one array, for `Task.collate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Padded(NamedTuple):
    """n sequences.

    Attributes:
        values: shape (n, longest, ...).
        mask: booleans, shape (n, longest): where `values` are those of the sequence.
    """

    values: npt.NDArray[Any]
    mask: npt.NDArray[np.bool_]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The length of each sequence, shape (n,)."""
        lengths: npt.NDArray[np.int64] = self.mask.sum(axis=1, dtype=np.int64)
        return lengths


def pad(sequences: Sequence[npt.ArrayLike], *, length: int | None = None, value: float = 0) -> Padded:
    """One array of sequences of different lengths.

    Args:
        sequences: at least one, shapes (m, ...) that differ in m only.
        length: that all become; None: that of the longest.
        value: after the end of each.

    Raises:
        ValueError: one is longer than `length`, or of another shape.
    """
    arrays = [np.asarray(sequence) for sequence in sequences]
    if not arrays or any(array.ndim == 0 or array.shape[1:] != arrays[0].shape[1:] for array in arrays):
        shapes = sorted({array.shape for array in arrays}, key=str)
        raise ValueError(f"expected sequences of one or more dimensions that differ in the first, got {shapes[:8]}")
    lengths = np.array([len(array) for array in arrays])
    longest = int(lengths.max()) if length is None else length
    if lengths.max() > longest:
        raise ValueError(f"expected sequences of at most {longest}, got one of {lengths.max()}")
    mask = np.arange(longest) < lengths[:, None]
    values = np.full((len(arrays), longest, *arrays[0].shape[1:]), value, np.result_type(*arrays))
    values[mask] = np.concatenate(arrays)
    return Padded(values, mask)
