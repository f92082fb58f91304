"""The state of launches that is kept between turns: incarnations, attempts, pending orders, pauses. Pure.

The outcomes of launches determine pauses. If an order got no machine, its slot waits before the next attempt. A pool
without capacity is avoided. If a market refuses, or its quota is used up, nothing is requested from it for some time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, get_args

import msgspec

from doll.provisioner.fleets.port import Instance, LaunchError, LaunchFailure, Order
from doll.provisioner.kept_state import KeptState
from doll.provisioner.planning.state import Market

_MOST_PAUSE_S: Final = 300.0  # a right that is missing for a moment, or a call that is unknown, is tried again


@dataclass(frozen=True)
class LaunchLimits:
    """Rates and timeouts of launches.

    Attributes:
        launches_per_min: maximum launches of the whole fleet per minute. Failed attempts count as well, but they only
            reduce the number of spot launches.
        fallbacks_per_min: maximum number of these launches that move a slot from spot to on-demand while the deadline
            is not in danger. More moves would use up the remaining pools.
        retry_s: time from an attempt that got no machine to the next attempt.
        pool_backoff_s: time for which a pool is avoided after it had no capacity or interrupted a machine. 0: never.
        quota_s: time for which nothing is requested from a market after its quota was used up.
        early_s, max_early_ends: an interruption less than `early_s` after the launch is early. More than
            `max_early_ends` early interruptions in a row pause the spot launches of the slot.
        backoff_s, max_backoff_s: first and longest pause; each pause is twice as long as the one before.
        boot_timeout_s, silence_timeout_s: an instance is replaced if its worker is not ready after `boot_timeout_s`, or
            silent for `silence_timeout_s`.
        min_refusals: number of turns in which a market must refuse machines, for other reasons than capacity, before it
            counts as closed.
        listing_lag_s: longest time until a launch appears in the listing. This includes launches whose answer was lost.
        max_failures: number of machines of a slot that may fail in a row before nothing more is launched for the slot.
            Interruptions do not count. The pause after each failure doubles, from `retry_s` to `max_backoff_s`.
        healthy_s: time for which a worker must hold its slot to end such a row of failures.
        notice_timeout_s: time after which an instance with an interruption notice is ended if it still exists.
    """

    launches_per_min: float = 120.0
    fallbacks_per_min: float = 60.0
    retry_s: float = 30.0
    pool_backoff_s: float = 180.0
    quota_s: float = 900.0
    early_s: float = 3600.0
    max_early_ends: int = 1
    backoff_s: float = 60.0
    max_backoff_s: float = 3600.0
    boot_timeout_s: float = 900.0
    silence_timeout_s: float = 300.0
    min_refusals: int = 3
    listing_lag_s: float = 60.0
    max_failures: int = 5
    healthy_s: float = 600.0
    notice_timeout_s: float = 600.0


class SlotAttempts(msgspec.Struct):
    """The launches of one slot. Only `LaunchState` changes it."""

    incarnation: int = 0  # the highest incarnation ever ordered or observed
    attempt: int = 0  # attempt of the next order with this incarnation
    failed: bool = False  # the order of `incarnation` made no machine, so the incarnation may be used again
    retry_at_s: dict[Market, float] = msgspec.field(default_factory=dict)  # time before which there is no attempt
    early: int = 0  # early interruptions in a row
    no_spot_s: float = -math.inf  # time at which spot last had no machine for this slot
    no_capacity: bool = False  # its last spot launch got no machine
    failures: int = 0  # machines in a row that failed
    failure: str = ""  # the failure of the last of these; "" if a machine has worked since


@dataclass
class _MarketRefusals:
    """The refusals of one market for other reasons than capacity."""

    message: str
    last_s: float
    turns: int = 1


class LaunchState(KeptState):
    """Launches and their outcomes. The caller reports every outcome.

    Attributes:
        no_capacity_s: Unix time of the last spot launch of any slot that got no machine; -inf if there was none, or if
            a later spot launch has succeeded.
        limits: limits of launches, which may be replaced at any time. Pauses that have begun do not change.
        pending: orders whose outcome is not known yet, with their times, by slot. They are repeated unchanged.
        launches_from_s: time before which nothing is launched. If the state of a predecessor is lost, it may have
            launched machines that are not listed yet.
        run: `Order.run` of new orders.
        stopped: reason why nothing is launched until a person acts; "": launches are allowed. It is only set before any
            launch has worked. If launches have worked before, they may work again, so they are paused and tried again
            instead.
    """

    KEPT: ClassVar = {
        "slots": list[SlotAttempts], "no_capacity_s": float, "launches_from_s": float,
        "avoided_pools": dict[Market, dict[str, float]], "quota": dict[Market, float], "launched_s": list[float],
        "failed_launches_s": list[float], "fallbacks_s": list[float],
    }  # fmt: skip

    def __init__(self, num_slots: int, limits: LaunchLimits, machines_per_worker: int = 1) -> None:
        self.limits = limits
        self._machines = machines_per_worker
        self.slots = [SlotAttempts() for _ in range(num_slots)]
        self.pending: dict[int, tuple[Order, float]] = {}
        self._avoided_pools: dict[Market, dict[str, float]] = {"spot": {}, "on_demand": {}}  # end of the avoidance
        self._quota: dict[Market, float] = {}  # time until which the quota counts as used up
        self._paused: dict[Market, float] = {}  # time until which the market is paused; not saved
        self._refused: dict[Market, _MarketRefusals] = {}  # refusals since the last launch; not saved
        self._launched_s: list[float] = []  # within the last minute
        self._failed_launches_s: list[float] = []  # attempts without a machine, within the last minute
        self._fallbacks_s: list[float] = []
        self.no_capacity_s = -math.inf
        self.launches_from_s = -math.inf
        self.run = ""
        self.stopped = ""

    def seen(self, slot: int, incarnation: int) -> None:
        """Record that an instance or a worker of this incarnation exists or existed."""
        attempts = self.slots[slot]
        if incarnation >= attempts.incarnation:
            attempts.incarnation, attempts.attempt, attempts.failed = incarnation, 0, False

    def ordered(self, order: Order, now_s: float, *, fallback: bool) -> None:
        """Record that the order is about to be made."""
        attempts = self.slots[order.slot]
        attempts.incarnation, attempts.attempt, attempts.failed = order.incarnation, order.attempt, False
        if order.slot not in self.pending or self.pending[order.slot][0] != order:
            self.pending[order.slot] = (order, now_s)
        self._launched_s.append(now_s)
        if fallback:
            self._fallbacks_s.append(now_s)

    def launched(self, order: Order) -> None:
        """Record that the order has launched its instance."""
        self.pending.pop(order.slot, None)
        attempts = self.slots[order.slot]
        attempts.retry_at_s.pop(order.market, None)
        self._refused.pop(order.market, None)
        self._paused.pop(order.market, None)
        if order.market == "spot":
            attempts.no_capacity, self.no_capacity_s = False, -math.inf

    def cancelled(self, order: Order) -> None:
        """Record that the order was not made."""
        self.pending.pop(order.slot, None)
        self.slots[order.slot].failed = True

    def failed(self, order: Order, error: LaunchError, now_s: float) -> None:
        """Record that the order got no instance."""
        limits, attempts = self.limits, self.slots[order.slot]
        retry_s = now_s + limits.retry_s
        if error.failure is LaunchFailure.THROTTLED:
            # It may have been carried out; a repetition of the same order shows this.
            attempts.retry_at_s[order.market] = now_s + min(limits.retry_s, 5.0)
            return
        if error.failure is LaunchFailure.TAKEN:
            # An instance has this order's name: wait until it is listed.
            attempts.retry_at_s[order.market] = retry_s
            return
        self.pending.pop(order.slot, None)
        # A failed attempt is no launch: slots that wait for spot must not delay slots that move to on-demand.
        if self._launched_s:
            self._launched_s.pop()
        self._failed_launches_s.append(now_s)
        attempts.attempt, attempts.failed = order.attempt + 1, True
        attempts.retry_at_s[order.market] = retry_s
        match error.failure:
            case LaunchFailure.REFUSED:
                self._refusal(order.market, str(error), now_s)
            case LaunchFailure.CAPACITY:
                if error.pools:  # the market does sell machines, but these pools have none now
                    self._refused.pop(order.market, None)
                for pool in error.pools if limits.pool_backoff_s > 0 else ():
                    self._avoided_pools[order.market][pool] = now_s + limits.pool_backoff_s
            case LaunchFailure.SPOT_QUOTA:
                self._quota["spot"] = now_s + limits.quota_s
            case LaunchFailure.ON_DEMAND_QUOTA:
                self._quota["on_demand"] = now_s + limits.quota_s
            case LaunchFailure.CONFIG if self.has_launched:
                turns = self._refusal(order.market, str(error), now_s)
                pause_s = min(limits.retry_s * 2.0 ** min(turns - 1, 30), _MOST_PAUSE_S)
                self._paused[order.market] = now_s + pause_s
            case LaunchFailure.CONFIG:
                self.stopped = str(error)
        if order.market == "spot" and not self.stopped:
            attempts.no_capacity, attempts.no_spot_s, self.no_capacity_s = True, now_s, now_s

    def _refusal(self, market: Market, message: str, now_s: float) -> int:
        """Record a refusal by a market. Returns the number of turns with refusals since the market's last launch."""
        refusal = self._refused.setdefault(market, _MarketRefusals(message, now_s))
        if now_s > refusal.last_s:
            refusal.turns += 1
        refusal.message, refusal.last_s = message, now_s
        return refusal.turns

    def interrupted(self, instance: Instance, at_s: float) -> None:
        """Record that a spot machine has an interruption notice, or was interrupted without notice."""
        limits, attempts = self.limits, self.slots[instance.slot]
        attempts.no_spot_s = max(attempts.no_spot_s, at_s)
        if limits.pool_backoff_s > 0:
            self._avoided_pools["spot"][instance.pool] = at_s + limits.pool_backoff_s
        if at_s - instance.launched_s >= limits.early_s:
            attempts.early = 0
            return
        attempts.early += 1
        if attempts.early > limits.max_early_ends:
            pause_s = limits.backoff_s * 2.0 ** (attempts.early - limits.max_early_ends - 1)
            self._not_before(attempts, "spot", at_s + min(pause_s, limits.max_backoff_s))

    def instance_failed(self, instance: Instance, why: str, now_s: float) -> None:
        """Record that a machine ended by itself, never became ready or went silent. The slot's next launch waits, in
        any market."""
        limits, attempts = self.limits, self.slots[instance.slot]
        attempts.failures += 1
        attempts.failure = f"{instance.id} {why}"
        pause_s = limits.retry_s * 2.0 ** min(attempts.failures - 1, 30)
        for market in get_args(Market):
            self._not_before(attempts, market, now_s + min(pause_s, limits.max_backoff_s))

    def instance_works(self, slot: int) -> None:
        """Record that a machine of the slot has worked for `healthy_s`."""
        attempts = self.slots[slot]
        attempts.failures, attempts.failure = 0, ""

    @staticmethod
    def _not_before(slot: SlotAttempts, market: Market, at_s: float) -> None:
        slot.retry_at_s[market] = max(slot.retry_at_s.get(market, -math.inf), at_s)

    def avoided_pools(self, market: Market, now_s: float) -> frozenset[str]:
        """Return the pools to avoid in this market. A pool without spot capacity may have on-demand capacity."""
        return frozenset(pool for pool, until_s in self._avoided_pools[market].items() if now_s < until_s)

    def blocked_s(self, slot: int, market: Market) -> float:
        """Return the time before which nothing is launched for the slot in this market; a past time if launches are
        allowed."""
        return max(
            self.slots[slot].retry_at_s.get(market, -math.inf), self._quota.get(market, -math.inf),
            self._paused.get(market, -math.inf),
        )  # fmt: skip

    def is_paused(self, market: Market, now_s: float) -> bool:
        """Return whether the market has just refused an order for a reason that applies to all orders."""
        return now_s < self._paused.get(market, -math.inf)

    @property
    def has_launched(self) -> bool:
        """Whether a slot has or had a machine, which shows that the job's settings allow launches."""
        return any(
            slot.incarnation > 1 or (slot.incarnation == 1 and not slot.failed and number not in self.pending)
            for number, slot in enumerate(self.slots)
        )

    def refusal(self, market: Market) -> str:
        """Return the market's last refusal for another reason than capacity; "" if none since the last launch."""
        return self._refused[market].message if market in self._refused else ""

    def is_closed(self, market: Market, now_s: float) -> bool:
        """Return whether the market has refused in `min_refusals` turns since its last launch. Machines are requested
        from it again after `quota_s`."""
        refusal, limits = self._refused.get(market), self.limits
        return refusal is not None and refusal.turns >= limits.min_refusals and now_s - refusal.last_s < limits.quota_s

    def gave_up(self, slot: int) -> bool:
        """Return whether too many machines of the slot failed in a row. Nothing more is launched for it until a person
        acts."""
        return self.slots[slot].failures >= self.limits.max_failures

    def stop_if_all_refuse(self, now_s: float) -> None:
        """Stop launching if both markets refuse for reasons that a person must correct. Call this only if no machine
        has worked yet."""
        markets: tuple[Market, ...] = get_args(Market)
        if all(self.is_closed(market, now_s) for market in markets):
            messages = dict.fromkeys(self.refusal(market) for market in markets)
            self.stopped = "every pool of both markets refuses: " + "; ".join(messages)

    def quota_s(self, market: Market) -> float:
        """Return the time until which the market's quota counts as used up."""
        return self._quota.get(market, -math.inf)

    def may_have_launched(self, now_s: float) -> bool:
        """Return whether a machine may exist that is not listed yet. A pending order may have launched it, or a
        predecessor whose state is lost."""
        listing_lag_s = self.limits.listing_lag_s
        return now_s < self.launches_from_s or any(
            now_s - since_s <= listing_lag_s for _, since_s in self.pending.values()
        )

    def next_order(self, slot: int, market: Market, now_s: float) -> Order:
        """Return the next order for the slot: a pending order unchanged, otherwise a new one."""
        if slot in self.pending:
            order, since_s = self.pending[slot]
            # Whatever is wanted now, it must first be known whether this order has launched a machine.
            if now_s - since_s <= self.limits.listing_lag_s:
                return order
        attempts = self.slots[slot]
        if attempts.failed:
            incarnation, attempt = attempts.incarnation, attempts.attempt
        else:
            incarnation, attempt = attempts.incarnation + 1, 0
        avoid = self.avoided_pools(market, now_s)
        return Order(slot, incarnation, market, attempt, avoid, self.run, self._machines)

    def launches_left(self, now_s: float) -> tuple[int, int, int]:
        """Return how many launches are left in this minute, and how many of these may be spot launches and fallbacks.
        Failed attempts count only against spot launches."""
        self._launched_s = [at_s for at_s in self._launched_s if now_s - at_s < 60]
        self._failed_launches_s = [at_s for at_s in self._failed_launches_s if now_s - at_s < 60]
        self._fallbacks_s = [at_s for at_s in self._fallbacks_s if now_s - at_s < 60]
        left = max(0, int(self.limits.launches_per_min) - len(self._launched_s))
        fallbacks = max(0, int(self.limits.fallbacks_per_min) - len(self._fallbacks_s))
        return left, max(0, left - len(self._failed_launches_s)), fallbacks

    def to_dict(self) -> dict[str, Any]:
        pending = [
            {"order": {**msgspec.to_builtins(order), "avoid": sorted(order.avoid)}, "since_s": since_s}
            for order, since_s in self.pending.values()
        ]
        return {"pending": pending, **super().to_dict()}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Restore the saved state, except `stopped`: after a restart, one refused order sets it again."""
        if len(kept["slots"]) != len(self.slots):
            raise ValueError(f"expected {len(self.slots)} slots, got {len(kept['slots'])}")
        super().restore(kept)
        orders = [(msgspec.convert(entry["order"], Order), float(entry["since_s"])) for entry in kept["pending"]]
        self.pending = {order.slot: (order, since_s) for order, since_s in orders}
