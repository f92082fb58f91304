"""The cost of instances: billing rules, the bill, a job's account, and reference costs for comparison. Pure.

A bill is computed from instance records and prices only, so computing the bill again gives the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
import numpy as np

from doll.errors import ServiceUnavailableError
from doll.provisioner.fleets.port import EndReason, Instance
from doll.provisioner.kept_state import KeptState
from doll.provisioner.planning.state import Market
from doll.provisioner.traces.model import Series, constant
from doll.records.control import ProvisionDecision
from doll.theory import checks
from doll.theory.checks import Floats
from doll.theory.cost import SECONDS_PER_HOUR, Prices

_NO_TIMES: Mapping[str, float] = MappingProxyType({})
MARKETS: tuple[Market, ...] = ("spot", "on_demand")
PriceOf = Callable[[str, Market, float, float], Series]
"""A function as `PriceFeed.series`; arguments: pool, market, start and end in Unix seconds."""


@dataclass(frozen=True)
class BillingRule:
    """The rule by which the owner of the machines bills time. A started step of `step_s` seconds is billed as a whole
    step (0: time is billed exactly). A spot instance costs nothing if its owner interrupts it within
    `free_if_interrupted_s`. `source` and `as_of` state the source of the rule and its date."""

    name: str
    step_s: float
    minimum_s: float
    free_if_interrupted_s: float
    source: str
    as_of: str

    def __post_init__(self) -> None:
        checks.non_negative(
            step_s=self.step_s, minimum_s=self.minimum_s, free_if_interrupted_s=self.free_if_interrupted_s
        )

    def billed_s(self, seconds: float) -> float:
        """Return the seconds that are billed for an instance that existed for `seconds`."""
        if self.step_s:
            # A tiny excess over a step is rounding of Unix times, not a started step.
            seconds = math.ceil((seconds - 1e-6) / self.step_s) * self.step_s
        return max(seconds, self.minimum_s)

    def is_free(self, instance: Instance) -> bool:
        """Return whether the instance costs nothing because its owner interrupted it soon after the launch."""
        if instance.end_reason is not EndReason.INTERRUPTED or instance.market != "spot" or instance.ended_s is None:
            return False
        return instance.ended_s - instance.launched_s < self.free_if_interrupted_s


EC2_LINUX = BillingRule(
    name="ec2-linux",
    step_s=1.0,
    minimum_s=60.0,
    free_if_interrupted_s=3600.0,
    source="Amazon EC2 User Guide, 'Billing for interrupted Spot Instances' (first hour, Linux); EC2 pricing page, "
    "per-second billing with a minimum of 60 s",
    as_of="2026-11",
)
AWS_LAMBDA = BillingRule(
    name="aws-lambda",
    step_s=0.001,
    minimum_s=0.0,
    free_if_interrupted_s=0.0,
    source="AWS Lambda pricing page: the duration from the start of the environment or of the handler to its end, "
    "rounded up to a millisecond, times the memory of the function. The price per request, 2e-7 USD, is left out",
    as_of="2026-11",
)
LOCAL = BillingRule(
    name="local",
    step_s=0.0,
    minimum_s=0.0,
    free_if_interrupted_s=0.0,
    source="DOLL's market on one machine: time as it is, as in Eq. (16) and (22) of the DOLL paper",
    as_of="2026-11",
)


@dataclass(frozen=True)
class BillLine:
    """One instance on the bill, with all of its machines.

    Attributes:
        usd_without_boots: the part of `usd` for the time in which the instance's worker held the slot: from ready until
            it was fenced or ended.
        free: whether the instance costs nothing because it was interrupted soon after the launch.
    """

    id: str
    slot: int
    incarnation: int
    market: Market
    pool: str
    launched_s: float
    ended_s: float | None
    end_reason: str
    billed_s: float
    usd: float
    usd_without_boots: float
    free: bool = False
    machines: int = 1


@dataclass(frozen=True)
class Bill:
    """A sum of bill lines.

    Attributes:
        usd_without_boots: see `BillLine`. The paper's cost (16), (22) excludes boots and overlaps of instances.
        hours_by_market: billed machine-hours of each market.
        instances, free: number of instances, and number of these that cost nothing.
    """

    usd: float = 0.0
    usd_by_market: Mapping[Market, float] = field(default_factory=dict)
    usd_without_boots: float = 0.0
    hours_by_market: Mapping[Market, float] = field(default_factory=dict)
    instances: int = 0
    free: int = 0
    lines: tuple[BillLine, ...] = ()

    def __post_init__(self) -> None:
        for name in ("usd_by_market", "hours_by_market"):
            given = getattr(self, name)
            object.__setattr__(self, name, {market: float(given.get(market, 0.0)) for market in MARKETS})

    @classmethod
    def total(cls, lines: Iterable[BillLine], earlier: Bill | None = None) -> Bill:
        """Return the sum of these lines and of an earlier bill."""
        before, new = cls() if earlier is None else earlier, tuple(lines)
        usd, hours = dict(before.usd_by_market), dict(before.hours_by_market)
        for line in new:
            usd[line.market] += line.usd
            hours[line.market] += line.billed_s / SECONDS_PER_HOUR
        return cls(
            usd=before.usd + math.fsum(line.usd for line in new), usd_by_market=usd,
            usd_without_boots=before.usd_without_boots + math.fsum(line.usd_without_boots for line in new),
            hours_by_market=hours, instances=before.instances + len(new),
            free=before.free + sum(line.free for line in new), lines=before.lines + new,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the lines."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "lines"}


def bill_lines(
    instances: Collection[Instance], price_of: PriceOf, rule: BillingRule, now_s: float,
    *, ready_s: Mapping[str, float] = _NO_TIMES, fenced_s: Mapping[str, float] = _NO_TIMES,
) -> list[BillLine]:  # fmt: skip
    """Return the cost of each instance until `now_s`, or until the instance ended.

    Args:
        price_of: function like `PriceFeed.series`, for the prices of one machine. Its errors are passed on.
        ready_s: Unix time at which the instance's worker got the slot, by instance id. Without this time,
            `usd_without_boots` is 0.
        fenced_s: Unix time at which the next instance took over the slot, by instance id.
    """
    lines: dict[str, BillLine] = {}
    pools: dict[tuple[str, Market], list[Instance]] = {}
    for instance in instances:
        pools.setdefault((instance.pool, instance.market), []).append(instance)
    for (pool, market), members in pools.items():
        start_s = np.array([_costs_from_s(instance) for instance in members])
        ended_s = [now_s if instance.ended_s is None else instance.ended_s for instance in members]
        end_s = np.maximum(start_s, ended_s)
        # The mean over a moment is the price at this time.
        until_s = np.maximum(end_s, start_s + 1e-3)
        series = price_of(pool, market, float(start_s.min()), float(until_s.max()))
        usd_per_s = (_integral(series, until_s) - _integral(series, start_s)) / (until_s - start_s) / SECONDS_PER_HOUR
        for instance, ends_s, price in zip(members, end_s.tolist(), usd_per_s.tolist(), strict=True):
            served_s = (ready_s.get(instance.id, math.inf), fenced_s.get(instance.id, math.inf))
            lines[instance.id] = _line(instance, rule, ends_s, price, served_s)
    return [lines[instance.id] for instance in instances]


def _costs_from_s(instance: Instance) -> float:
    return instance.launched_s if instance.costs_from_s is None else instance.costs_from_s


def _integral(series: Series, at_s: Floats) -> Floats:
    """Return the integral of the step function from its first time to `at_s`. Outside of its times, the function has
    its first or last value."""
    times, values = series.times_s, series.values
    sums = np.concatenate(([0.0], np.cumsum(values[:-1] * np.diff(times))))
    index = np.clip(np.searchsorted(times, at_s, side="right") - 1, 0, len(times) - 1)
    integral: Floats = sums[index] + values[index] * (at_s - times[index])
    return integral


def _line(
    instance: Instance, rule: BillingRule, end_s: float, usd_per_s: float, served_s: tuple[float, float]
) -> BillLine:
    """Return the bill of one instance. `usd_per_s` is the price of one machine; `served_s` is infinite if not known."""
    count, free = instance.machines, rule.is_free(instance)
    was_never_placed = instance.costs_from_s is not None and end_s <= instance.costs_from_s
    billed_s = 0.0 if free or was_never_placed else rule.billed_s(end_s - _costs_from_s(instance))
    worked_s = min(billed_s, max(0.0, min(end_s, served_s[1]) - max(instance.launched_s, served_s[0])))
    return BillLine(
        id=instance.id, slot=instance.slot, incarnation=instance.incarnation, market=instance.market,
        pool=instance.pool, launched_s=instance.launched_s, ended_s=instance.ended_s,
        end_reason=instance.end_reason.value, billed_s=billed_s * count, usd=usd_per_s * billed_s * count,
        usd_without_boots=usd_per_s * worked_s * count, free=free, machines=count,
    )  # fmt: skip


def bill(instances: Collection[Instance], price_of: PriceOf, rule: BillingRule, now_s: float) -> Bill:
    """Return the cost of these instances until `now_s`. Each instance is counted once by its id. See `bill_lines`."""
    distinct = {instance.id: instance for instance in instances}
    return Bill.total(bill_lines(distinct.values(), price_of, rule, now_s))


def all_on_demand_usd(samples: float, rates_per_s: Floats, on_demand_usd_per_h: float) -> float:
    """Return the cost of the same work with every worker on-demand: N * π_o * run time at the total rate. π_o is
    `on_demand_usd_per_h`.

    Args:
        samples: J * K * b, the work that was done or must be done.
        rates_per_s: λ_n, samples per second of each stream, shape (N,).

    Source: the DOLL paper, Eq. (3) and (5), for unequal streams.

    >>> import numpy as np
    >>> round(all_on_demand_usd(10_000 * 20 * 256, np.full(64, 125.0), 0.286), 3)
    32.54
    """
    rates = checks.rates(rates_per_s)
    checks.non_negative(samples=samples, on_demand_usd_per_h=on_demand_usd_per_h)
    return samples / float(rates.sum()) / SECONDS_PER_HOUR * len(rates) * on_demand_usd_per_h


def usd_per_1000_updates(usd: float, updates: float) -> float:
    """Return the USD per thousand updates; NaN before the first update."""
    return usd / updates * 1000 if updates > 0 else math.nan


def usd_per_error_point(usd: float, first_error: float, error: float) -> float:
    """Return the USD per percentage point by which the held-out error (a fraction) has fallen; otherwise NaN.

    >>> usd_per_error_point(3.0, 0.9, 0.6)
    0.1
    """
    points = (first_error - error) * 100
    return round(usd / points, 12) if points > 0 else math.nan


LINES_KEPT_S = 24 * 3600.0
"""After this time since an instance ended, its bill is kept only as part of a sum. No fleet lists it any more."""


class BillingAccount(KeptState):
    """Bills instances, and stores the bills of ended instances. `price_of` is a function like `PriceFeed.series`."""

    KEPT: ClassVar = {"earlier_usd": float, "last_usd": float, "last_usd_per_h": dict[str, float]}
    LATER: ClassVar = ("last_usd_per_h",)

    def __init__(self, rule: BillingRule, price_of: PriceOf) -> None:
        self._rule = rule
        self._feed = price_of
        self._last_usd_per_h: dict[str, float] = {}  # by market and pool
        self.clear()

    def clear(self) -> None:
        """Start a new bill of zero."""
        self._lines: dict[str, BillLine] = {}  # bill lines of ended instances
        self._archived_bill = Bill()  # bill of instances that ended long ago
        self._earlier_usd = 0.0
        self._last_usd = 0.0

    @property
    def billed(self) -> Collection[str]:
        """The ids of ended instances that have a line on the bill."""
        return self._lines.keys()

    def expect_earlier_costs(self) -> None:
        """Record that the state is lost. The next bill then includes the cost from the newest published decision."""
        self._earlier_usd = math.nan

    def bill_ended(
        self, instance: Instance, now_s: float, *, ready_s: Mapping[str, float], fenced_s: Mapping[str, float]
    ) -> BillLine:
        """Add the final bill of an ended instance to the account. Raises ServiceUnavailableError if there are no
        prices."""
        (line,) = bill_lines([instance], self._price_of, self._rule, now_s, ready_s=ready_s, fenced_s=fenced_s)
        self._lines[instance.id] = line
        return line

    def reopen(self, instance: Instance) -> None:
        """Withdraw the final bill of an instance that runs: it was listed late, or it was stopped and started again. An
        instance that was started again is billed from its new start, and an instance that had not ended from its
        launch."""
        line = self._lines.pop(instance.id)
        if line.ended_s is not None and instance.launched_s >= line.ended_s:
            self._keep_sum(line)

    def bill(
        self, running: Collection[Instance], now_s: float, *, ready_s: Mapping[str, float],
        fenced_s: Mapping[str, float], announced: ProvisionDecision | None, otherwise: Prices | None, machines: int,
        alarms: list[str],
    ) -> Bill:  # fmt: skip
        """Return the bill until now, which never decreases. If prices are unavailable, the last known prices are used.

        Args:
            running: instances to bill; instances with a final bill are not billed again.
            announced: the newest published decision, see `expect_earlier_costs`.
            otherwise: prices of a worker with `machines` machines. They are used for pools whose price was never known.
            alarms: list that gets a line if prices are not available.
        """
        running = [instance for instance in running if instance.id not in self._lines]
        lines, missing = list[BillLine](), list[str]()

        def price_of(pool: str, market: Market, start_s: float, end_s: float) -> Series:
            try:
                return self._price_of(pool, market, start_s, end_s)
            except ServiceUnavailableError as exc:
                missing.append(str(exc))
                usd_per_h = self._last_usd_per_h.get(_key(pool, market))
                if usd_per_h is None and otherwise is not None:
                    usd_per_h = otherwise.spot_usd_per_h if market == "spot" else otherwise.on_demand_usd_per_h
                    usd_per_h /= machines
                if usd_per_h is None:
                    raise
                return constant(usd_per_h, start_s, end_s)

        try:
            lines = bill_lines(running, price_of, self._rule, now_s, ready_s=ready_s, fenced_s=fenced_s)
        except ServiceUnavailableError as exc:
            alarms.append(f"running instances cannot be billed now: {exc}")
        else:
            if missing:
                alarms.append(f"running instances are billed at the last known prices: {missing[0]}")
        self._archive(now_s)
        bill = self._ended_bill(lines)
        if math.isnan(self._earlier_usd):
            spent_usd = announced.spent_usd if announced is not None and math.isfinite(announced.spent_usd) else 0.0
            self._earlier_usd = max(0.0, spent_usd - bill.usd)
        usd = bill.usd + self._earlier_usd
        self._last_usd = max(usd, self._last_usd) if missing else usd
        return replace(bill, usd=self._last_usd)

    def last_bill(self) -> Bill:
        """Return the last bill, for a turn in which nothing can be observed."""
        return replace(self._ended_bill(), usd=self._last_usd)

    def _ended_bill(self, others: Iterable[BillLine] = ()) -> Bill:
        return Bill.total([*self._lines.values(), *others], self._archived_bill)

    def _archive(self, now_s: float) -> None:
        for id_, line in list(self._lines.items()):
            if now_s - (line.ended_s or now_s) > LINES_KEPT_S:
                self._keep_sum(line)
                del self._lines[id_]

    def _keep_sum(self, line: BillLine) -> None:
        self._archived_bill = replace(Bill.total([line], self._archived_bill), lines=())

    def _price_of(self, pool: str, market: Market, start_s: float, end_s: float) -> Series:
        """Return the series of the price feed, and store its newest price."""
        series = self._feed(pool, market, start_s, end_s)
        self._last_usd_per_h[_key(pool, market)] = float(series.values[-1])
        return series

    def to_dict(self) -> dict[str, Any]:
        lines = msgspec.to_builtins(list(self._lines.values()))
        return {"lines": lines, "archived_bill": self._archived_bill.to_dict(), **super().to_dict()}

    def restore(self, kept: Mapping[str, Any]) -> None:
        super().restore(kept)
        self._lines = {line["id"]: BillLine(**line) for line in kept["lines"]}
        self._archived_bill = Bill(**kept["archived_bill"])


def _key(pool: str, market: Market) -> str:
    return f"{market} {pool}"
