"""A made-up recording for backtests: machines that go up and down at random."""

from __future__ import annotations

import numpy as np
from doll.provisioner.traces.model import Pool, Series, TraceSet, constant

_HOUR_S = 3600.0


def flicker(seed: int, hours: float = 400.0, alpha: float = 0.8, cycle_s: float = 5 * _HOUR_S) -> TraceSet:
    """Two pools of one machine each, up and down at random."""
    rng = np.random.default_rng(seed)
    pools = []
    for name in ("a", "b"):
        lengths = rng.exponential(cycle_s / 2, 2000) * np.tile([2 * alpha, 2 * (1 - alpha)], 1000)
        times = np.concatenate([[0.0], np.cumsum(lengths)])
        times = times[times < hours * _HOUR_S]
        up = Series(np.append(times, hours * _HOUR_S), np.append(np.arange(len(times)) % 2 == 0, False).astype(float))
        pools.append(Pool(name, 1, 0.286, constant(0.158, 0.0, hours * _HOUR_S), up))
    return TraceSet("flicker", tuple(pools))
