"""Jobs that are cut out of recordings: their pool, their start time, and the market for each slot and hour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from doll.errors import ConfigError
from doll.provisioner.planning.pauses import MAX_HOURS
from doll.provisioner.planning.state import Bools
from doll.provisioner.traces.availability import slots_up
from doll.provisioner.traces.model import Floats, Pool, TraceSet


@dataclass(frozen=True)
class Windows:
    """W jobs of T ticks on N slots, all of one trace set.

    Attributes:
        up: whether a spot machine for this slot is available, bool, shape (W, T, N).
        price: USD per spot machine and hour, shape (W, T).
        on_demand: USD per on-demand machine and hour, shape (W,).
        pool_alpha, pool_price: means over each job's whole recording, shape (W,); a static plan may use them.
        start_s: start of each job in its recording in seconds, shape (W,).
        earlier_price: recorded prices of up to `MAX_HOURS` hours before each job, the newest last.
    """

    up: Bools
    price: Floats
    on_demand: Floats
    pool_alpha: Floats
    pool_price: Floats
    pools: tuple[str, ...]
    start_s: Floats
    tick_s: float
    earlier_price: tuple[Floats, ...] = ()

    def __len__(self) -> int:
        return len(self.pools)


def sample(
    trace_set: TraceSet, *, count: int, length_s: float, tick_s: float, num_slots: int, rng: np.random.Generator
) -> Windows:
    """Draw `count` jobs of `length_s` seconds: pools in turn, start times uniform within each pool's recording.

    Raises:
        ConfigError: no recording is long enough.
    """
    pools = [pool for pool in trace_set.pools if pool.length_s >= length_s]
    if not pools:
        longest_s = max(pool.length_s for pool in trace_set.pools)
        raise ConfigError(
            f"trace set {trace_set.name}: expected a recording of {length_s:.0f} s or more, the longest has "
            f"{longest_s:.0f} s; ask for a shorter job"
        )
    ticks = int(np.ceil(length_s / tick_s - 1e-9))
    chosen = [pools[index] for index in (rng.permutation(len(pools) * -(-count // len(pools))) % len(pools))[:count]]
    starts = np.array([rng.uniform(pool.start_s, pool.end_s - length_s) for pool in chosen])
    times = [start + np.arange(ticks) * tick_s for start in starts]
    return Windows(
        up=np.stack([slots_up(pool, at_s, num_slots, rng) for pool, at_s in zip(chosen, times, strict=True)]),
        price=np.stack([pool.price.at(at_s) for pool, at_s in zip(chosen, times, strict=True)]),
        on_demand=np.array([pool.on_demand_usd_per_hour for pool in chosen]),
        pool_alpha=np.array([pool.alpha for pool in chosen]),
        pool_price=np.array([pool.price.mean(pool.start_s, pool.end_s) for pool in chosen]),
        pools=tuple(pool.name for pool in chosen),
        start_s=starts,
        tick_s=tick_s,
        earlier_price=tuple(_hours_before(pool, start) for pool, start in zip(chosen, starts, strict=True)),
    )


def _hours_before(pool: Pool, start_s: float) -> Floats:
    hours = min(MAX_HOURS, int((start_s - pool.start_s) // 3600.0))
    return pool.price.at(np.asarray(start_s - 3600.0 * np.arange(hours, 0, -1), dtype=np.float64))


def clairvoyant_usd(windows: Windows, *, rates_per_s: Sequence[float], samples: float, deadline_s: float) -> Floats:
    """Return a lower bound on the cost of each job: the cheapest slot-hours that do the work in time, shape (W,).

    Every slot and tick costs the spot price if a machine is available and cheaper, otherwise the on-demand price. The
    slots and ticks with the lowest cost per sample are taken until the work is done. Booting and moving cost nothing
    and the future is known, so no policy can be cheaper.
    """
    rates = np.asarray(rates_per_s, float)
    count, ticks, _ = windows.up.shape
    span_s = np.clip(deadline_s - np.arange(ticks) * windows.tick_s, 0.0, windows.tick_s)
    bound = np.empty(count)
    for job in range(count):
        on_demand = windows.on_demand[job]
        spot = np.minimum(windows.price[job], on_demand)
        usd_per_hour = np.where(windows.up[job], spot[:, None], on_demand)  # (T, N)
        work = span_s[:, None] * rates  # samples per slot and tick
        unit = (usd_per_hour / rates).ravel()
        order = np.argsort(unit, kind="stable")
        done = np.cumsum(work.ravel()[order])
        last = int(np.searchsorted(done, samples * (1 - 1e-12)))
        if last >= len(done):
            bound[job] = np.inf
            continue
        costs = np.cumsum((usd_per_hour * span_s[:, None]).ravel()[order]) / 3600.0
        before = costs[last - 1] if last else 0.0
        done_before = done[last - 1] if last else 0.0
        share = (samples - done_before) / (done[last] - done_before)
        bound[job] = before + share * (costs[last] - before)
    return bound
