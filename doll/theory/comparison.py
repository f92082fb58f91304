"""The largest of several quantities that are measured together, if it is larger than the others by more than noise."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from doll.theory.checks import Floats

_BLOCK_ROWS: Final = 4  # rows that are averaged: neighbours in time are not independent
_MIN_BLOCKS: Final = 6
_QUANTILE: Final = 0.975


class Largest(NamedTuple):
    """A column of measured values, the mean by which it exceeds the next one, and the standard error of this mean."""

    column: int
    excess: float
    error: float


def certain_largest(values: Floats) -> Largest | None:
    """Return the column of `values`, shape (n, N), whose expected value is above that of each other; None if noise
    could explain it.

    Rows are in the order of time. The values of a row are measured together, so columns are compared by their
    differences in each row, averaged over blocks of rows. Student's t of the largest column's mean difference from each
    other column must be above the quantile 97.5 %. If the largest expected value is that of two columns,
    one of them is then returned with a probability of 5 %; if it is that of more, with a smaller one, because all
    others must be exceeded.
    """
    num_blocks, columns = len(values) // _BLOCK_ROWS, values.shape[1]
    if columns < 2 or num_blocks < _MIN_BLOCKS:
        return None
    from scipy.special import stdtrit

    blocks = values[-num_blocks * _BLOCK_ROWS :].reshape(num_blocks, _BLOCK_ROWS, columns).mean(axis=1)
    largest = int(blocks.mean(axis=0).argmax())
    differences = blocks[:, [largest]] - np.delete(blocks, largest, axis=1)
    means, errors = differences.mean(axis=0), differences.std(axis=0, ddof=1) / math.sqrt(num_blocks)
    if not (means > stdtrit(num_blocks - 1, _QUANTILE) * errors).all():
        return None
    following = int(means.argmin())
    return Largest(largest, float(means[following]), float(errors[following]))
