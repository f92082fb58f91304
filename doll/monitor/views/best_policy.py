"""The policy that was best by one measure, and whether the differences are more than noise. Pure.

All policies run with the same seeds, so that their values are compared seed by seed: what a seed does to all of them
cancels out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from doll.theory.comparison import is_more_than_noise, standard_error


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
