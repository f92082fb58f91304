"""The policy that was best by one measure, and whether the differences are more than noise. Pure.

All policies run with the same seeds, so that their values are compared seed by seed: what a seed does to all of them
cancels out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Final, NamedTuple

# 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom; the last one stands for more, at most 14 % too strict.
_T: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def t_factor(count: int) -> float:
    """Return within how many standard errors the mean of `count` differences is noise; NaN for fewer than two."""
    return _T[min(count - 1, len(_T)) - 1] if count > 1 else math.nan


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


class Best(NamedTuple):
    """The best policy by one measure, of `seeds` runs each.

    Attributes:
        mean, standard_error: over its runs; the error of one run is NaN.
        alike: policies whose difference from it is not more than noise. With one seed: whose value is equal.
        second, second_mean: the policy with the next best mean.
    """

    by: str
    policy: str
    mean: float
    standard_error: float
    alike: list[str]
    second: str
    second_mean: float
    seeds: int

    def text(self, shown: Callable[[float], str]) -> str:
        """Return the policy with its value, and the policies that are as good. `shown`: formats a value."""
        error = f" ± {shown(self.standard_error)}" if self.seeds > 1 else ""
        why = "more than noise" if self.seeds > 1 else f"then {self.second}, {shown(self.second_mean)}"
        if self.alike:
            why = f"{', '.join(self.alike)}: {'within noise' if self.seeds > 1 else 'the same'}"
        return f"by {self.by} {self.policy} ({shown(self.mean)}{error}; {why})"


def best_of(by: str, values: Mapping[str, Sequence[float]], *, is_most: bool = False) -> Best | None:
    """Return the best policy by the measure `by`; None if there are fewer than two to compare.

    Args:
        values: values of each policy, one for each seed, for the same seeds in the same order.
        is_most: whether the highest mean is best; otherwise the lowest.
    """
    if len(values) < 2:
        return None
    means = {policy: fmean(row) for policy, row in values.items()}
    best, *others = sorted(means, key=lambda policy: -means[policy] if is_most else means[policy])
    seeds, alike = len(values[best]), []
    for other in others:
        differences = [a - b for a, b in zip(values[other], values[best], strict=True)]
        if not (is_more_than_noise(differences) if seeds > 1 else differences[0]):
            alike.append(other)
    return Best(by, best, means[best], standard_error(values[best]), alike, others[0], means[others[0]], seeds)
