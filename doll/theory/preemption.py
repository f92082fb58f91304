"""Spot workers that come and go: how much of the time they are up, and how much that varies.

Model: each spot worker is a two-state Markov chain of its own, up with probability α in the long run, one up and one
down period lasting `cycle_s` together on average. Where outages come together, variances grow
by a design effect.

Source: the DOLL paper, Section IV (Eq. (4)-(6)); the variance is derived in docs/theory.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from doll.theory import checks

_NEVER = 1e-200  # a share of the time below this counts as 0


def uptime_variance_s2(time_s: float, alpha: float, cycle_s: float) -> float:
    """v(t): variance of the seconds that one spot worker is up within `time_s`, from a stationary start.

    v(t) = 2 p [t/g - (1 - e^(-g t)) / g²], p = α (1 - α), g = 1 / (p · cycle).

    Args:
        time_s: length of the window, seconds.
        alpha: availability, in [0, 1]; 0 and 1 have no variance.
        cycle_s: mean seconds of one up and one down period together.

    >>> round(uptime_variance_s2(6720, 0.9, 1000.0))
    107406
    """
    checks.non_negative(time_s=time_s)
    checks.fraction(alpha=alpha)
    checks.positive(cycle_s=cycle_s)
    p = alpha * (1 - alpha)
    if p == 0:
        return 0.0
    relaxation_s = p * cycle_s
    x = time_s / relaxation_s
    # x - (1 - e^-x) loses all digits for small x; its series begins with x²/2.
    excess = x * x / 2 - x**3 / 6 if x < 1e-4 else x + math.expm1(-x)
    return 2 * p * relaxation_s**2 * excess


class Availability(NamedTuple):
    """Long-run share of the time for which something is up, and the mean length of an up and a down period together."""

    alpha: float
    cycle_s: float


def gang_availability(machines: int, alpha: float, cycle_s: float) -> Availability:
    """Availability of k machines that are used all together or not at all: α^k, and cycle / (k α^(k-1)).

    Assumes that the machines come and go independently, each a chain of its own. A period with all k up ends k times as
    often as that of one machine, after α cycle / k on average; these periods are a share α^k of the time. Machines that
    fail together are lost more rarely: machines of a pool that come and go together have the α and the cycle of
    one machine.

    Args:
        machines: k, 1 or more.
        alpha, cycle_s: of one machine.

    >>> [round(value, 3) for value in gang_availability(3, 0.9, 1000.0)]
    [0.729, 411.523]
    >>> gang_availability(1, 0.9, 1000.0)
    Availability(alpha=0.9, cycle_s=1000.0)
    """
    checks.positive(machines=machines, cycle_s=cycle_s)
    checks.fraction(alpha=alpha)
    all_up = alpha**machines
    if machines == 1 or all_up < _NEVER:
        return Availability(alpha if machines == 1 else 0.0, cycle_s)
    return Availability(all_up, alpha * cycle_s / (machines * all_up))
