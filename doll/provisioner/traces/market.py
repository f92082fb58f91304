"""A simulated spot market: when spot is available for each slot, when machines are preempted, and the prices of
machines. Pure.

The market replays a recorded pool (docs/traces.md) or the paper's two-state chain, `speed_up` times as fast as the wall
clock. Times are wall seconds since the market opened. Prices are in USD per *wall* hour: the market's price times the
speed-up. A bill over wall time therefore equals the bill over the market time that has passed. At the end of an up
interval, the owner gives notice and ends the machine `notice_s` later. A share of the intervals ends without notice.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from doll.config import JobConfig, PlanConfig, ProcessesFleetConfig
from doll.errors import ConfigError
from doll.provisioner.planning.state import Bools, Market
from doll.provisioner.traces.availability import Markov, all_up, pool_of_workers, slots_up
from doll.provisioner.traces.model import Floats, Pool, Series, constant
from doll.provisioner.traces.recordings import pool_of
from doll.theory.cost import Prices
from doll.theory.preemption import gang_availability

_MARKOV = "chain"


@dataclass(frozen=True)
class AvailabilityInterval:
    """The n-th interval of a slot, in which its spot machine is available or not. Times are wall seconds since the
    opening; `end_s` may be infinite. `taken_s` is the time at which the machine of an up interval ends: `end_s` plus
    the notice, if there is one."""

    number: int
    up: bool
    start_s: float
    end_s: float
    taken_s: float

    @property
    def without_notice(self) -> bool:
        """Whether the interval ends without notice."""
        return self.taken_s == self.end_s


class SpotMarket:
    """N slots, each with its own intervals, in one market with one price of a machine. Raises ConfigError for an
    invalid number.

    Args:
        spans: spans (up, market seconds) of each slot from the opening on, without end; see `Preemption.spans`.
        prices: spot price, USD per market hour over market seconds; repeated after its end.
        on_demand_usd_per_h: on-demand price, USD per market hour.
        no_notice_share: share of the up intervals that end without notice; `seed` chooses them.
        offset_s: market seconds in `prices` after its first time at which the market opens.

    Attributes:
        name: name of the pool or of the chain.
        speed_up: market seconds per wall second.
        notice_s: wall seconds between the end of an up interval and the end of its machine, for any `speed_up`, because
            a worker cannot leave faster.
        machines_per_slot: k; the machines of a slot are available together, and get their notices together.
        alpha: share of the time for which a slot's machines are available, according to the source.
    """

    def __init__(
        self,
        spans: Sequence[Iterator[tuple[bool, float]]],
        prices: Series,
        on_demand_usd_per_h: float,
        *,
        name: str,
        alpha: float,
        speed_up: float = 1.0,
        notice_s: float = 2.0,
        no_notice_share: float = 0.0,
        seed: int = 0,
        offset_s: float = 0.0,
        machines_per_slot: int = 1,
    ) -> None:
        if not 0 < speed_up < math.inf or not 0 <= notice_s < math.inf or not 0 <= no_notice_share <= 1:
            raise ConfigError(
                f"expected a speed-up above 0, a notice of 0 s or more and a share without notice in [0, 1], got "
                f"{speed_up}, {notice_s} and {no_notice_share}"
            )
        self.name, self.alpha, self.speed_up = name, alpha, speed_up
        self.notice_s, self.machines_per_slot = notice_s, machines_per_slot
        self._spans = list(spans)
        self._intervals: list[list[AvailabilityInterval]] = [[] for _ in spans]
        self._starts: list[list[float]] = [[] for _ in spans]
        self._held: list[tuple[bool, float] | None] = [None] * len(self._spans)
        self._prices, self._on_demand, self._offset_s = prices, on_demand_usd_per_h, offset_s
        self._no_notice_share, self._seed = no_notice_share, seed

    @classmethod
    def chain(
        cls, num_slots: int, prices: Prices, *, alpha: float, cycle_s: float, speed_up: float = 1.0,
        notice_s: float = 2.0, no_notice_share: float = 0.0, seed: int = 0, machines_per_slot: int = 1,
        one_by_one: bool = True,
    ) -> Self:  # fmt: skip
        """Return a market with the paper's model: each machine is up a share `alpha` of the time, with a cycle of
        `cycle_s` market seconds. Machines of a slot change independently if `one_by_one`, otherwise together."""
        # One generator per machine, so that its intervals do not depend on the order of requests.
        count = machines_per_slot if one_by_one else 1
        machines = [
            Markov(alpha, cycle_s, np.random.default_rng((seed, 1, number))).spans(number)
            for number in range(num_slots * count)
        ]
        spans = [all_up(machines[n * count : (n + 1) * count]) for n in range(num_slots)]
        return cls(
            spans, constant(prices.spot_usd_per_h, 0.0, 1.0), prices.on_demand_usd_per_h, name=_MARKOV,
            alpha=gang_availability(count, alpha, cycle_s).alpha, speed_up=speed_up, notice_s=notice_s,
            no_notice_share=no_notice_share, seed=seed, machines_per_slot=machines_per_slot,
        )  # fmt: skip

    @classmethod
    def replay(
        cls, pool: Pool, num_slots: int, *, length_s: float, speed_up: float = 1.0, notice_s: float = 2.0,
        no_notice_share: float = 0.0, seed: int = 0, machines_per_slot: int = 1,
    ) -> Self:  # fmt: skip
        """Return a market that replays a recorded pool from a random time on; after its end the recording continues at
        its beginning. The share of slots that are up equals the share of machines that are up; the slots are drawn as
        in a backtest. If a slot has several machines, the pool is counted in slots (`pool_of_workers`). The opening is
        chosen so that `length_s` wall seconds are left before the recording's end, if the recording is long enough."""
        rng = np.random.default_rng((seed, 2))
        latest = max(pool.start_s, pool.end_s - length_s * speed_up)
        start_s = float(rng.uniform(pool.start_s, latest)) if latest > pool.start_s else pool.start_s
        inside = pool.num_up.times_s[(pool.num_up.times_s > pool.start_s) & (pool.num_up.times_s < pool.end_s)]
        edges = np.unique(np.concatenate(([pool.start_s, start_s], inside, [pool.end_s])))
        turned = np.roll(np.arange(len(edges) - 1), -int(np.searchsorted(edges, start_s)))
        up = slots_up(pool, edges[turned], num_slots, rng)
        seconds = np.diff(edges)[turned]
        within = (pool.price.times_s > pool.start_s) & (pool.price.times_s < pool.end_s)
        times_s = np.concatenate(([pool.start_s], pool.price.times_s[within], [pool.end_s]))
        return cls(
            [_repeat(up[:, n], seconds) for n in range(num_slots)],
            Series(times_s, pool.price.at(times_s)), pool.on_demand_usd_per_hour, name=pool.name, alpha=pool.alpha,
            speed_up=speed_up, notice_s=notice_s, no_notice_share=no_notice_share, seed=seed,
            offset_s=start_s - pool.start_s, machines_per_slot=machines_per_slot,
        )  # fmt: skip

    @property
    def num_slots(self) -> int:
        return len(self._spans)

    def interval(self, slot: int, at_s: float) -> AvailabilityInterval:
        """Return the interval at this time (0 or later); an interval includes its start but not its end."""
        intervals, starts = self._intervals[slot], self._starts[slot]
        while not intervals or intervals[-1].end_s <= at_s:
            intervals.append(self._next(slot))
            starts.append(intervals[-1].start_s)
        return intervals[max(0, bisect_right(starts, at_s) - 1)]

    def gaps(self, slot: int, until_s: float) -> list[tuple[float, float]]:
        """Return start and end of each time before `until_s` without spot for this slot, in order."""
        found, at_s = [], 0.0
        while at_s < until_s:
            interval = self.interval(slot, at_s)
            if not interval.up:
                found.append((round(at_s, 1), round(min(interval.end_s, until_s), 1)))
            at_s = interval.end_s
        return found

    def is_up(self, slot: int, at_s: float) -> bool:
        """Return whether spot is available for this slot, or its spot machine runs without a notice."""
        return self.interval(slot, at_s).up

    def _next(self, slot: int) -> AvailabilityInterval:
        intervals = self._intervals[slot]
        start_s = intervals[-1].end_s if intervals else 0.0
        up, seconds = self._held[slot] or next(self._spans[slot])
        self._held[slot] = None
        # Two spans of one kind are one interval; an interval of 100,000 spans counts as endless.
        for _ in range(100_000):
            if math.isinf(seconds):
                break
            also_up, more_s = next(self._spans[slot])
            if also_up != up:
                self._held[slot] = also_up, more_s
                break
            seconds += more_s
        else:
            seconds = math.inf
        number, end_s = len(intervals), start_s + seconds / self.speed_up
        taken_s = end_s
        if up and np.random.default_rng((self._seed, 3, slot, number)).random() >= self._no_notice_share:
            taken_s += self.notice_s
        return AvailabilityInterval(number, up, start_s, end_s, taken_s)

    @property
    def on_demand_usd_per_h(self) -> float:
        return self._on_demand * self.speed_up

    def spot_usd_per_h(self, at_s: float) -> float:
        place_s = float(self._prices.times_s[0]) + (self._offset_s + at_s * self.speed_up) % self._period_s
        return float(self._prices.at(np.array([place_s]))[0]) * self.speed_up

    def prices(self, at_s: float) -> Prices:
        return Prices(self.spot_usd_per_h(at_s), self.on_demand_usd_per_h)

    def spot_changes_s(self, start_s: float, end_s: float) -> list[float]:
        """Return the times at which the spot price changes between these times, ascending."""
        first, period = float(self._prices.times_s[0]), self._period_s
        laps = range(int(self._lap(start_s)), int(self._lap(end_s)) + 1)
        # The recording's last time is its end: from there on the first price of the next repetition holds.
        times = [(first_s - first + lap * period - self._offset_s) / self.speed_up
                 for lap in laps for first_s in self._prices.times_s[:-1].tolist()]  # fmt: skip
        return [time_s for time_s in times if start_s < time_s < end_s]

    @property
    def _period_s(self) -> float:
        return float(self._prices.times_s[-1] - self._prices.times_s[0])

    def _lap(self, at_s: float) -> float:
        return (self._offset_s + at_s * self.speed_up) // self._period_s


class MarketClock:
    """Converts Unix seconds to a market's own time, which stays 0 until the market is opened.

    The market opens after the start of a job (importing torch, joining), so no machine is preempted or billed before.
    """

    def __init__(self) -> None:
        self.opened_s: float | None = None

    def open(self, now_s: float) -> None:
        """Open the market now. May be repeated; only the first call counts."""
        if self.opened_s is None:
            self.opened_s = now_s

    def since(self, now_s: float) -> float:
        """Return the wall seconds since the opening; 0 before it."""
        return 0.0 if self.opened_s is None else max(0.0, now_s - self.opened_s)


class TracePrices:
    """A `PriceFeed` of a replayed market, in USD per wall hour. Before the market opens nothing is billed."""

    def __init__(self, market: SpotMarket, clock: MarketClock) -> None:
        self._market = market
        self._clock = clock

    def current(self, now_s: float) -> Prices:
        return self._market.prices(self._clock.since(now_s))

    def series(self, pool: str, market: Market, start_s: float, end_s: float) -> Series:
        """Return the same series for every pool, because a replayed market has one price."""
        opened_s = self._clock.opened_s
        if opened_s is None or end_s <= opened_s:
            return Series(np.array([start_s, end_s]), np.zeros(2))
        begin_s = max(start_s, opened_s)
        changes = [] if market == "on_demand" else self._market.spot_changes_s(begin_s - opened_s, end_s - opened_s)
        times = [begin_s, *(opened_s + change_s for change_s in changes), end_s]
        # In the middle of each piece, because rounding at its edge could show the price before.
        prices = [self._market.prices((one + two) / 2 - opened_s) for one, two in itertools.pairwise(times)]
        values = [each.spot_usd_per_h if market == "spot" else each.on_demand_usd_per_h for each in prices]
        values.append(values[-1])
        if start_s < opened_s:
            times, values = [start_s, *times], [0.0, *values]
        return Series(np.array(times), np.array(values))


def _repeat(up: Bools, seconds: Floats) -> Iterator[tuple[bool, float]]:
    if up.all() or not up.any():
        yield bool(up[0]), math.inf
    changes = np.flatnonzero(np.diff(up.astype(np.int8))) + 1
    merged = list(zip(up[np.concatenate(([0], changes))].tolist(),
                      np.add.reduceat(seconds, np.concatenate(([0], changes))).tolist(), strict=True))  # fmt: skip
    while True:
        yield from merged


def make_market(config: JobConfig, fleet: ProcessesFleetConfig, seed: int) -> tuple[SpotMarket, PlanConfig]:
    """Return the job file's market, and its plan with the market's own availability (of a worker) and prices (of a
    machine). Raises ConfigError if the trace or the pool does not exist, or if prices are missing."""
    plan, slots, machines = config.plan, config.data.workers, config.machines_per_worker
    if fleet.trace is None:
        if plan.spot_usd_per_h is None or plan.on_demand_usd_per_h is None:
            raise ConfigError("expected plan.spot_usd_per_h and plan.on_demand_usd_per_h, or a trace")
        one_by_one = plan.availability_of == "machine"
        market = SpotMarket.chain(
            slots, Prices(plan.spot_usd_per_h, plan.on_demand_usd_per_h), alpha=plan.alpha, cycle_s=plan.cycle_s,
            speed_up=fleet.speed_up, notice_s=fleet.notice_s, no_notice_share=fleet.no_notice_share, seed=seed,
            machines_per_slot=machines, one_by_one=one_by_one,
        )  # fmt: skip
        return market, plan
    pool = pool_of_workers(pool_of(config.path(fleet.trace), fleet.pool, "fleet.pool"), machines, slots)
    market = SpotMarket.replay(
        pool, slots, length_s=plan.deadline_s or 0.0, speed_up=fleet.speed_up, notice_s=fleet.notice_s,
        no_notice_share=fleet.no_notice_share, seed=seed, machines_per_slot=machines,
    )  # fmt: skip
    section = plan.model_copy(
        update={
            "alpha": pool.alpha, "cycle_s": pool.cycle_s, "availability_of": "worker",
            "spot_usd_per_h": pool.price.mean(pool.start_s, pool.end_s),
            "on_demand_usd_per_h": pool.on_demand_usd_per_hour,
        }
    )  # fmt: skip
    return market, section
