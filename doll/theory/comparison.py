"""Comparison of quantities that are measured together: whether their differences are more than noise. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.theory.checks import Floats

_BLOCK_ROWS: Final = 4  # rows that are averaged: neighbours in time are not independent
_MIN_BLOCKS: Final = 6
_LEAST_SHARE: Final = 1e-4  # of an empty bin
# 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom. `t_factor` computes those for more.
_T: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def t_factor(count: int) -> float:
    """Return within how many standard errors the mean of `count` differences is noise: the 97.5 % quantile of Student's
    t; NaN for fewer than two.
    """
    if count < 2:
        return math.nan
    return _T[count - 2] if count - 1 <= len(_T) else t_quantile(0.975, count - 1)


def t_quantile(level: float, freedom: int) -> float:
    """Return the quantile of Student's t at `level` for at least 1 degree of freedom: three terms of the expansion of
    Cornish and Fisher, which are exact to 0.0002 at 97.5 % for more than 10 degrees; too small for few."""
    z = NormalDist().inv_cdf(level)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))


def stability_index(counts: npt.ArrayLike, before: npt.ArrayLike) -> float:
    """Return the population stability index between two histograms with the same bins: the sum of (p - q) ln(p / q)
    (Lewis, An Introduction to Credit Scoring, 1994). Above 0.2 the two are usually said to differ.

    >>> round(stability_index([50, 50], [50, 50]), 3), round(stability_index([20, 80], [50, 50]), 3)
    (0.0, 0.416)
    """
    p, q = (np.maximum(each / each.sum(), _LEAST_SHARE) for each in map(np.asarray, (counts, before)))
    return float(np.sum((p - q) * np.log(p / q)))


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; NaN for fewer than two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def is_more_than_noise(differences: Sequence[float]) -> bool:
    """Return whether the mean of paired differences is beyond t of its standard errors: a two-sided test at 5 %. One
    difference never is.

    >>> is_more_than_noise([0.02, 0.021, 0.019]), is_more_than_noise([0.05, -0.01, 0.02]), is_more_than_noise([0.05])
    (True, False, False)
    """
    return abs(fmean(differences)) > t_factor(len(differences)) * standard_error(differences)


class Largest(NamedTuple):
    """A column of measured values, the mean by which it exceeds the next one, and the standard error of this mean."""

    column: int
    excess: float
    error: float


def certain_largest(values: Floats) -> Largest | None:
    """Return the column of `values`, shape (n, N), whose expected value is above that of each other; None if noise
    could explain it.

    Rows are in the order of time. The values of a row are measured together, so columns are compared by their
    differences in each row, averaged over blocks of rows. The largest column's mean difference from each other column
    must be more than `t_factor` of its standard errors. If the largest expected value is that of two columns, one of
    them is then returned with a probability of 5 %; if it is that of more, with a smaller one, because all others must
    be exceeded.
    """
    num_blocks, columns = len(values) // _BLOCK_ROWS, values.shape[1]
    if columns < 2 or num_blocks < _MIN_BLOCKS:
        return None
    blocks = values[-num_blocks * _BLOCK_ROWS :].reshape(num_blocks, _BLOCK_ROWS, columns).mean(axis=1)
    largest = int(blocks.mean(axis=0).argmax())
    differences = blocks[:, [largest]] - np.delete(blocks, largest, axis=1)
    means, errors = differences.mean(axis=0), differences.std(axis=0, ddof=1) / math.sqrt(num_blocks)
    if not (means > t_factor(num_blocks) * errors).all():
        return None
    following = int(means.argmin())
    return Largest(largest, float(means[following]), float(errors[following]))
