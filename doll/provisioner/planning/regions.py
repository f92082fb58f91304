"""One plan over the pools of several regions: the cost of a machine away from home, and the region of each slot. Pure.

Kafka, the parameter server and the checkpoints stay in the home region. A worker in another region pays for its
traffic: samples and weights leave the home region, and contributions leave the region of the worker. When it starts
there, it also reads the weights once. `plan_regions` adds these costs to the prices. The planner then decides between
spot and on-demand as in one region, where spot is available if any region has a machine at a price below on-demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from doll.config.policy import PolicyConfig
from doll.provisioner.planning.market_rules import Slack
from doll.provisioner.planning.planner import Plan, plan, start
from doll.provisioner.planning.state import Bools, PlannerSettings, PlannerState
from doll.theory import checks
from doll.theory.checks import Floats
from doll.theory.cost import SECONDS_PER_HOUR, Prices

Ints = npt.NDArray[np.int64]

NOWHERE: Final = -1
_BYTES_PER_GB: Final = 1e9
_VALUE_BITS: Final = 32
_POSITION_BITS: Final = 16  # of a number in a sparse push


@dataclass(frozen=True)
class Traffic:
    """The bytes that a worker exchanges with the home region. Raises ValueError for a number below 0.

    Attributes:
        out_bytes: bytes per sample that leave the home region: the record and its share of the weights.
        back_bytes: bytes per sample that leave the worker's region: its share of the contributions.
        start_bytes: bytes that a new worker reads before its first sample: the weights.
    """

    out_bytes: float = 0.0
    back_bytes: float = 0.0
    start_bytes: float = 0.0

    def __post_init__(self) -> None:
        checks.non_negative(out_bytes=self.out_bytes, back_bytes=self.back_bytes, start_bytes=self.start_bytes)


def policy_traffic(
    policy: PolicyConfig, *, model_bytes: float, batch_size: float, num_workers: int, record_bytes: float = 0.0
) -> Traffic:
    """Return the traffic of a worker that reads the weights and sends a contribution once per push. Not counted: the
    further versions that `essp` sends, and rows of tables.

    >>> from doll.config.policy import POLICIES
    >>> diloco = POLICIES.validate({"name": "diloco", "local_batches": 100})
    >>> policy_traffic(diloco, model_bytes=4e6, batch_size=40, num_workers=8).back_bytes
    1000.0
    """
    per_push = model_bytes / (batch_size * policy.batches_per_push)
    sparse = policy.sparse_push
    sent = 1.0 if sparse is None else min(1.0, sparse.density * (sparse.bits + _POSITION_BITS) / _VALUE_BITS)
    read = min(1.0, sent * num_workers) if policy.publishes_deltas else 1.0
    return Traffic(record_bytes + read * per_push, sent * per_push, model_bytes)


@dataclass(frozen=True)
class Region:
    """A region with the prices of one machine (of a worker) and of a GB that leaves it. Raises ValueError for a price
    of traffic below 0."""

    name: str
    prices: Prices
    egress_usd_per_gb: float = 0.0

    def __post_init__(self) -> None:
        checks.non_negative(egress_usd_per_gb=self.egress_usd_per_gb)

    def egress_usd_per_h(self, home: Region, traffic: Traffic, rate_per_s: float) -> float:
        """Return the cost of the traffic of a worker in this region that learns `rate_per_s` samples per second."""
        if self.name == home.name:
            return 0.0
        usd = traffic.out_bytes * home.egress_usd_per_gb + traffic.back_bytes * self.egress_usd_per_gb
        return usd * rate_per_s * SECONDS_PER_HOUR / _BYTES_PER_GB

    def start_usd(self, home: Region, traffic: Traffic) -> float:
        """Return the cost of the traffic of a worker's start in this region."""
        return 0.0 if self.name == home.name else traffic.start_bytes * home.egress_usd_per_gb / _BYTES_PER_GB

    def with_traffic(self, home: Region, traffic: Traffic, rate_per_s: float) -> Prices:
        """Return the prices of a worker with its traffic."""
        egress = self.egress_usd_per_h(home, traffic, rate_per_s)
        return Prices(self.prices.spot_usd_per_h + egress, self.prices.on_demand_usd_per_h + egress)


@dataclass(frozen=True)
class RegionCosts:
    """The prices of a machine in each region with its traffic; the first region is home.

    Attributes:
        rate_per_s: samples per second that a machine learns.
        policy: name of the policy whose traffic it is.
    """

    regions: Sequence[Region]
    traffic: Traffic
    rate_per_s: float
    policy: str

    @property
    def prices(self) -> list[Prices]:
        return [each.with_traffic(self.regions[0], self.traffic, self.rate_per_s) for each in self.regions]

    @property
    def spot(self) -> int:
        """The number of the region with the cheapest spot machine."""
        return min(range(len(self.regions)), key=lambda each: self.prices[each].spot_usd_per_h)

    @property
    def on_demand(self) -> int:
        """The number of the region with the cheapest on-demand machine."""
        return min(range(len(self.regions)), key=lambda each: self.prices[each].on_demand_usd_per_h)

    @property
    def cheapest(self) -> Prices:
        """The lowest prices with traffic."""
        prices = self.prices
        return Prices(prices[self.spot].spot_usd_per_h, prices[self.on_demand].on_demand_usd_per_h)

    def lines(self) -> list[str]:
        """Return the comparison as text."""
        home, traffic = self.regions[0], self.traffic
        width = max(len(each.name) for each in self.regions)
        return [
            f"Regions, USD/h per machine; Kafka, server and checkpoints are in {home.name} (per sample under "
            f"{self.policy}: {traffic.out_bytes:.0f} bytes out, {traffic.back_bytes:.0f} back):",
            *(
                f"  {each.name:<{width}}  spot {each.prices.spot_usd_per_h:.4f}  on-demand "
                f"{each.prices.on_demand_usd_per_h:.4f}  traffic "
                f"{each.egress_usd_per_h(home, traffic, self.rate_per_s):.4f} ({each.egress_usd_per_gb:g} USD/GB)  "
                f"a start {each.start_usd(home, traffic):.4f} USD"
                for each in self.regions
            ),
            f"  cheapest with traffic: spot in {self.regions[self.spot].name}, on-demand in "
            f"{self.regions[self.on_demand].name}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        home = self.regions[0]
        return {
            "home": home.name, "policy": self.policy, "traffic": asdict(self.traffic),
            "spot": self.regions[self.spot].name, "on_demand": self.regions[self.on_demand].name,
            "regions": [
                {
                    "name": each.name, **asdict(each.prices), "egress_usd_per_gb": each.egress_usd_per_gb,
                    "egress_usd_per_h": each.egress_usd_per_h(home, self.traffic, self.rate_per_s),
                    "start_usd": each.start_usd(home, self.traffic),
                }
                for each in self.regions
            ],
        }  # fmt: skip


@dataclass(frozen=True)
class SpotRegions:
    """Spot in R regions for N slots, now.

    Attributes:
        usd_per_h: price of a machine with the traffic of its slot, shape (R, N).
        available: whether the slot's machine runs there or one can be launched there, shape (R, N).
        start_usd: cost of the traffic of a start, shape (R,).
        life_s: mean time until a machine is interrupted, shape (R,).
    """

    usd_per_h: Floats
    available: Bools
    start_usd: Floats
    life_s: Floats

    def move_usd(self, boot_s: float) -> Floats:
        """Return the cost of a start in each region: a boot and its traffic, shape (R, N)."""
        return self.usd_per_h * boot_s / SECONDS_PER_HOUR + self.start_usd[:, None]

    def useful_usd_per_h(self, boot_s: float, left_s: float) -> Floats:
        """Return the cost per hour of work of a machine that is launched now, with its start, shape (R, N). The start
        is spread over the time until an interruption or the end of the job."""
        stay_h = np.maximum(np.minimum(self.life_s, left_s), boot_s + 1.0)[:, None] / SECONDS_PER_HOUR
        return self.usd_per_h + self.move_usd(boot_s) / stay_h


@dataclass(frozen=True)
class RegionPlan:
    """The markets of all slots, and the region of each slot on spot: its number, or `NOWHERE` if it waits for a machine
    or is on-demand; shape (N,)."""

    plan: Plan
    region: Ints

    @property
    def on_spot(self) -> Bools:
        return self.plan.on_spot


def plan_regions(
    state: PlannerState, settings: PlannerSettings, spot: SpotRegions, region: Ints, *, first: bool = False
) -> RegionPlan:
    """Choose market and region of every slot for the next `settings.replan_s` seconds.

    A slot whose machine runs stays in its region, unless a move pays (`moves_that_pay`) and leaves the slack that the
    guard needs. A slot without a machine goes to the region with the lowest cost per hour of work.

    Args:
        state: the job as in one region. `prices.on_demand_usd_per_h` is the lowest price of all regions with traffic.
            `prices.spot_usd_per_h` and `spot_available` are computed here.
        region: current region of each slot's spot machine, `NOWHERE` without one, shape (N,).
        first: whether this is the first plan of a job. All slots may then start anywhere, and nothing boots.
    """
    slots = np.arange(state.num_workers)
    left_s = max(0.0, settings.deadline_s - state.elapsed_s)
    cost = spot.useful_usd_per_h(0.0 if first else settings.boot_s, left_s)
    limit_usd_per_h = state.prices.on_demand_usd_per_h
    runs = (region != NOWHERE) & spot.available[region, slots] & state.on_spot & (not first)
    runs &= spot.usd_per_h[region, slots] < limit_usd_per_h  # above it, the slot waits while the slack allows it
    usable = spot.available & (cost < limit_usd_per_h)
    open_ = np.where(runs, True, usable.any(axis=0))
    best = np.argmin(np.where(usable, cost, np.inf), axis=0)
    target = np.where(runs, region, np.where(usable.any(axis=0), best, NOWHERE))
    relaunched = state.on_spot & ~runs & open_ & (not first)
    usd_per_h = np.where(target == NOWHERE, spot.usd_per_h.min(axis=0), spot.usd_per_h[target, slots])
    single = replace(
        state, spot_available=open_, prices=replace(state.prices, spot_usd_per_h=float(usd_per_h.mean())),
        moved_s=np.where(relaunched, state.elapsed_s, state.moved_s),
    )  # fmt: skip
    decided = start(single, settings) if first else plan(single, settings)
    if not first:
        better = moves_that_pay(spot, np.where(runs & decided.on_spot, region, NOWHERE), settings.boot_s, left_s)
        moving = _affordable(better != NOWHERE, single, settings)
        target = np.where(moving, better, target)
    return RegionPlan(decided, np.where(decided.on_spot, target, NOWHERE))


def moves_that_pay(spot: SpotRegions, region: Ints, boot_s: float, left_s: float) -> Ints:
    """Return the region to which a running slot should move, `NOWHERE` if it should stay, shape (N,).

    A move pays if the lower price, until one of the two machines is interrupted or the job ends, saves more than the
    boot and the traffic of the start cost.
    """
    slots = np.arange(len(region))
    there = region != NOWHERE
    stay_h = np.minimum(np.minimum(spot.life_s[:, None], spot.life_s[region]), left_s) / SECONDS_PER_HOUR
    saved = (spot.usd_per_h[region, slots] - spot.usd_per_h) * stay_h - spot.move_usd(boot_s)
    saved = np.where(spot.available, saved, -np.inf)
    best = np.argmax(saved, axis=0)
    return np.where(there & (saved[best, slots] > 0), best, NOWHERE)


def _affordable(moving: Bools, state: PlannerState, settings: PlannerSettings) -> Bools:
    """Return the slots, slowest first, whose boots leave 1.5 times the slack that the guard requires, as for returns
    (`market_rules.affordable`)."""
    slots = np.flatnonzero(moving)
    chosen = np.zeros(len(moving), dtype=np.bool_)
    if slots.size:
        rates = state.rates_per_s
        order = slots[np.argsort(rates[slots], kind="stable")]
        exposed = (settings.detection_delay + settings.boot_s) * float(rates[state.on_spot].sum())
        left = Slack.compute(state, settings).spare_samples - settings.boot_s * np.cumsum(rates[order])
        chosen[order[left >= 1.5 * exposed]] = True
    return chosen


class LifetimeEstimator:
    """The mean time until a machine of each region is interrupted: time with a machine over interruptions, with one
    interruption in `prior_s` before the first observation. Probes of slots without a machine count, too."""

    def __init__(self, num_regions: int, prior_s: float = 4 * SECONDS_PER_HOUR) -> None:
        self._up_s = np.full(num_regions, prior_s)
        self._lost = np.ones(num_regions)
        self._last: Bools | None = None

    def observe(self, available: Bools, seconds: float) -> None:
        """Record the availability, shape (R, N), that holds since `seconds`."""
        if self._last is not None:
            self._up_s += seconds * (self._last & available).mean(axis=1)
            self._lost += (self._last & ~available).mean(axis=1)
        self._last = available.copy()

    @property
    def life_s(self) -> Floats:
        return self._up_s / self._lost
