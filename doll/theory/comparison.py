"""The largest of several quantities that are measured together, if it is larger than the others by more than noise."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from doll.extras import lacking
from doll.theory import checks
from doll.theory.checks import Floats

FALSE_RATE: Final = 0.05
_BLOCK_ROWS: Final = 4  # rows that are averaged: neighbours in time are not independent
_MIN_BLOCKS: Final = 6


class Largest(NamedTuple):
    """A column of measured values, the mean by which it exceeds the next one, and the standard error of this mean."""

    column: int
    excess: float
    error: float


def certain_largest(values: Floats, false_rate: float = FALSE_RATE) -> Largest | None:
    """Return the column whose expected value is above that of every other column; None if noise could explain it.

    The values of a row are measured under the same conditions, so two columns are compared by their differences in each
    row, averaged over blocks of successive rows. The largest column is certain if Student's t of its mean difference
    from each other column is above the quantile 1 - `false_rate` / 2. A column with an equal is then returned with a
    probability of at most `false_rate`, however many columns there are: of two, either may be the larger one; each
    further equal is one more that must be exceeded.

    Args:
        values: shape (n, N), finite; rows in the order of time.
    """
    checks.fraction(false_rate=false_rate)
    num_blocks, columns = len(values) // _BLOCK_ROWS, values.shape[1]
    if columns < 2 or num_blocks < _MIN_BLOCKS:
        return None
    try:
        from scipy.special import stdtrit
    except ImportError as error:
        raise lacking("the scale-in tuner", "provision") from error
    blocks = values[-num_blocks * _BLOCK_ROWS :].reshape(num_blocks, _BLOCK_ROWS, columns).mean(axis=1)
    largest = int(blocks.mean(axis=0).argmax())
    differences = blocks[:, [largest]] - np.delete(blocks, largest, axis=1)
    means, errors = differences.mean(axis=0), differences.std(axis=0, ddof=1) / math.sqrt(num_blocks)
    if not (means > stdtrit(num_blocks - 1, 1 - false_rate / 2) * errors).all():
        return None
    following = int(means.argmin())
    return Largest(largest, float(means[following]), float(errors[following]))
