"""The normal distribution without SciPy, whose import costs more than a whole plan."""

from __future__ import annotations

import math
from statistics import NormalDist

_STANDARD = NormalDist()


def quantile(probability: float) -> float:
    """z with P(Z <= z) = `probability`, in (0, 1).

    >>> round(quantile(0.95), 3)
    1.645
    """
    return _STANDARD.inv_cdf(probability)


def tail(z: float) -> float:
    """P(Z > z), also for infinite z.

    >>> tail(0.0), tail(math.inf)
    (0.5, 0.0)
    """
    return 0.5 * math.erfc(z / math.sqrt(2))
