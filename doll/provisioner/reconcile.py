"""From the machines that are there to those that are wanted: what to launch, end or wait for, and why. Pure.

One slot at a time, by these rules:

- An instance is *ready* when its worker has the slot; that fences every older one. What is older than a ready instance
  is ended; nothing is ended before.
- A slot never has more than two instances, the second only to replace the first.
- An instance with a notice is left alone: its owner ends it, and may not charge for it. It is replaced at once.
- What nobody wants (slots that are none, machines of a job that is over) is ended.

`LaunchState` holds what must be known from one turn to the next: numbers of incarnations and attempts, pending orders,
pools without capacity, pauses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from doll.provisioner.fleets.port import Instance, LaunchError, LaunchFailure, Order
from doll.provisioner.planning.state import Market


@dataclass(frozen=True)
class LaunchLimits:
    """How fast, and how often.

    Attributes:
        launches_per_min: of the whole fleet. Tries in vain count too, but hold back tries on spot only.
        fallbacks_per_min: of those, from spot to on-demand while the deadline is not in danger: all at once would drain
            the pools that are left.
        retry_s: until the next try after one that found no machine.
        pool_backoff_s: how long a pool is avoided that was dry, or has just taken a machine back; 0: never.
        quota_s: how long a market is left alone after its quota was used up.
        early_s: a spot machine that is taken back within this time was taken early.
        max_early_ends: how many early ends in a row are borne before a slot's spot launches pause.
        backoff_s, max_backoff_s: first and longest pause; each one doubles.
        boot_timeout_s: an instance whose worker is not ready by then is replaced.
        silence_timeout_s: so is one whose worker has not been heard for this long.
        refusals: in so many turns a market must have refused machines, not for lack of capacity, to count as closed.
        listing_lag_s: how long a launch that the fleet acknowledged, or may have made, is waited for to be listed.
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
    refusals: int = 3
    listing_lag_s: float = 60.0


# --- what comes out -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """Make this order."""

    order: Order
    why: str


@dataclass(frozen=True)
class Terminate:
    """End this instance."""

    id: str
    slot: int
    why: str


@dataclass(frozen=True)
class Wait:
    """Nothing can be done for this slot now."""

    slot: int
    why: str


FleetAction = Launch | Terminate | Wait


# --- what goes in ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FleetStatus:
    """The fleet and what is wanted of it, at one moment.

    Attributes:
        wanted: market of each slot; None: no machine.
        reasons: why, one per slot.
        instances: as the fleet lists them.
        ready_s: since when an instance's worker has its slot, by id; those not in it are not ready.
        silent_s: for how long a worker that had its slot has not been heard, by id of its instance.
        waited_s: for how long one that is not ready could have become so, by id.
        held: the highest incarnation whose worker has had the slot, by slot.
        urgent: the deadline is in danger: fallbacks are not held back.
        spare_usd: what may still be committed; infinite without a budget.
        commit_usd: what one launch commits, by market.
        unlisted: ids of instances that are known from their launch, but not in the fleet's own listing yet. A notice
            would not show, so they are not ended before they are listed.
    """

    wanted: Sequence[Market | None]
    reasons: Sequence[str]
    instances: Sequence[Instance]
    ready_s: Mapping[str, float]
    silent_s: Mapping[str, float] = field(default_factory=dict)
    waited_s: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[int, int] = field(default_factory=dict)
    urgent: bool = False
    spare_usd: float = math.inf
    commit_usd: Mapping[Market, float] = field(default_factory=dict)
    unlisted: Collection[str] = frozenset()


@dataclass
class _SlotAttempts:
    """What is remembered of one slot."""

    incarnation: int = 0  # the highest that was ever ordered, seen or heard of
    attempt: int = 0  # of the next order with that incarnation
    failed: bool = False  # the order of `incarnation` got nothing for sure, so the incarnation may be tried again
    retry_at_s: dict[Market, float] = field(default_factory=dict)  # no try before
    early: int = 0  # early ends in a row
    no_spot_s: float = -math.inf  # last sign that spot is not to be had for this slot
    no_capacity: bool = False  # its last spot launch found nothing


@dataclass
class _Refusal:
    """A market that refuses machines, and not for lack of capacity."""

    says: str
    last_s: float
    turns: int = 1


class LaunchState:
    """What the provisioner remembers between its turns. It is told of outcomes; `to_dict` and `restore` keep it.

    Attributes:
        limits: may be replaced at any time; pauses that have begun stay as they are.
    """

    def __init__(self, num_slots: int, limits: LaunchLimits) -> None:
        self.limits = limits
        self._slots = [_SlotAttempts() for _ in range(num_slots)]
        self.pending: dict[int, tuple[Order, float]] = {}
        """Orders whose outcome is not known yet, by slot, and since when: they are made again exactly as they were."""
        self._avoided_pools: dict[Market, dict[str, float]] = {"spot": {}, "on_demand": {}}  # until
        self._quota: dict[Market, float] = {}  # until
        self._refused: dict[Market, _Refusal] = {}  # since the last launch; a successor asks anew
        self._launched_s: list[float] = []  # within the last minute
        self._failed_launches_s: list[float] = []  # tries that found no machine, within the last minute
        self._fallbacks_s: list[float] = []
        self._no_capacity_s = (
            -math.inf
        )  # when a spot launch of any slot last found nothing; over when one finds something
        self.launches_from_s = -math.inf
        """Until when nothing is launched: a predecessor whose state is lost may have made what is not listed yet."""
        self.run = ""
        """`Order.run` of new orders."""
        self.stopped = ""
        """Why nothing is launched any more; a person must mend it."""

    # --- outcomes

    def seen(self, slot: int, incarnation: int) -> None:
        """There is, or was, an instance or a worker of this incarnation."""
        one = self._slots[slot]
        if incarnation >= one.incarnation:
            one.incarnation, one.attempt, one.failed = incarnation, 0, False

    def ordered(self, order: Order, now_s: float, *, fallback: bool) -> None:
        """The order is about to be made."""
        one = self._slots[order.slot]
        one.incarnation, one.attempt, one.failed = order.incarnation, order.attempt, False
        if order.slot not in self.pending or self.pending[order.slot][0] != order:
            self.pending[order.slot] = (order, now_s)
        self._launched_s.append(now_s)
        if fallback:
            self._fallbacks_s.append(now_s)

    def launched(self, order: Order) -> None:
        """It got an instance."""
        self.pending.pop(order.slot, None)
        one = self._slots[order.slot]
        one.retry_at_s.pop(order.market, None)
        self._refused.pop(order.market, None)
        if order.market == "spot":
            one.no_capacity, self._no_capacity_s = False, -math.inf

    def cancelled(self, order: Order) -> None:
        """It was not made after all."""
        self.pending.pop(order.slot, None)
        self._slots[order.slot].failed = True

    def failed(self, order: Order, error: LaunchError, now_s: float) -> None:
        """It got none."""
        limits, one = self.limits, self._slots[order.slot]
        retry_s = now_s + limits.retry_s
        if error.failure is LaunchFailure.THROTTLED:
            # It may have been carried out: the same order again finds out.
            one.retry_at_s[order.market] = now_s + min(limits.retry_s, 5.0)
            return
        if error.failure is LaunchFailure.TAKEN:
            # Something has this order's name: wait for it to be listed.
            one.retry_at_s[order.market] = retry_s
            return
        self.pending.pop(order.slot, None)
        # What bought nothing is no launch: slots that ask for spot in vain must not hold back those that go on-demand.
        if self._launched_s:
            self._launched_s.pop()
        self._failed_launches_s.append(now_s)
        one.attempt, one.failed = order.attempt + 1, True
        one.retry_at_s[order.market] = retry_s
        match error.failure:
            case LaunchFailure.REFUSED:
                self._refusal(order.market, str(error), now_s)
            case LaunchFailure.CAPACITY:
                if error.pools:  # some were asked, and would give machines if they had any
                    self._refused.pop(order.market, None)
                for pool in error.pools if limits.pool_backoff_s > 0 else ():
                    self._avoided_pools[order.market][pool] = now_s + limits.pool_backoff_s
            case LaunchFailure.SPOT_QUOTA:
                self._quota["spot"] = now_s + limits.quota_s
            case LaunchFailure.ON_DEMAND_QUOTA:
                self._quota["on_demand"] = now_s + limits.quota_s
            case LaunchFailure.CONFIG:
                self.stopped = str(error)
        if order.market == "spot" and error.failure is not LaunchFailure.CONFIG:
            one.no_capacity, one.no_spot_s, self._no_capacity_s = True, now_s, now_s

    def _refusal(self, market: Market, says: str, now_s: float) -> None:
        known = self._refused.setdefault(market, _Refusal(says, now_s))
        if now_s > known.last_s:
            known.turns += 1
        known.says, known.last_s = says, now_s

    def interrupted(self, instance: Instance, at_s: float) -> None:
        """A spot machine has got its notice, or was taken without one."""
        limits, one = self.limits, self._slots[instance.slot]
        one.no_spot_s = max(one.no_spot_s, at_s)
        if limits.pool_backoff_s > 0:
            self._avoided_pools["spot"][instance.pool] = at_s + limits.pool_backoff_s
        if at_s - instance.launched_s >= limits.early_s:
            one.early = 0
            return
        one.early += 1
        if one.early > limits.max_early_ends:
            pause_s = limits.backoff_s * 2.0 ** (one.early - limits.max_early_ends - 1)
            self._not_before(one, "spot", at_s + min(pause_s, limits.max_backoff_s))

    def instance_failed(self, instance: Instance, now_s: float) -> None:
        """A machine ended by itself, never got ready or fell silent: the next one of this slot waits a little."""
        self._not_before(self._slots[instance.slot], instance.market, now_s + self.limits.retry_s)

    @staticmethod
    def _not_before(one: _SlotAttempts, market: Market, at_s: float) -> None:
        one.retry_at_s[market] = max(one.retry_at_s.get(market, -math.inf), at_s)

    # --- questions

    def avoided_pools(self, market: Market, now_s: float) -> frozenset[str]:
        """Pools to avoid in this market: one that is dry on spot may well have machines on demand."""
        return frozenset(pool for pool, until_s in self._avoided_pools[market].items() if now_s < until_s)

    def blocked_s(self, slot: int, market: Market) -> float:
        """Until when nothing of this market is to be launched for the slot; in the past where it may be."""
        return max(self._slots[slot].retry_at_s.get(market, -math.inf), self._quota.get(market, -math.inf))

    def refusal(self, market: Market) -> str:
        """What the market said when it last refused a machine, not for lack of capacity; "" where it did not."""
        return self._refused[market].says if market in self._refused else ""

    def is_closed(self, market: Market, now_s: float) -> bool:
        """It has refused in several turns and given nothing since; after a while it is asked again."""
        known, limits = self._refused.get(market), self.limits
        return known is not None and known.turns >= limits.refusals and now_s - known.last_s < limits.quota_s

    def quota_s(self, market: Market) -> float:
        """Until when the market's quota is taken as used up."""
        return self._quota.get(market, -math.inf)

    def no_spot_since_s(self, slot: int) -> float:
        """When spot was last seen not to be had for this slot."""
        return self._slots[slot].no_spot_s

    def lacks_capacity(self, slot: int) -> bool:
        """The slot's last spot launch found nothing."""
        return self._slots[slot].no_capacity

    def no_capacity_since_s(self) -> float:
        """When a spot launch of any slot last found nothing, and none has found anything since; else long ago."""
        return self._no_capacity_s

    def may_have_launched(self, now_s: float) -> bool:
        """There may be a machine that is not listed yet: of an order without an answer, or of a state that is lost."""
        listing_lag_s = self.limits.listing_lag_s
        return now_s < self.launches_from_s or any(
            now_s - since_s <= listing_lag_s for _, since_s in self.pending.values()
        )

    def incarnation(self, slot: int) -> int:
        """The highest incarnation that was ever used for the slot."""
        return self._slots[slot].incarnation

    def next_order(self, slot: int, market: Market, now_s: float) -> Order:
        """The order that gets the slot a machine: one that may have been carried out as it was, else a new one."""
        if slot in self.pending:
            order, since_s = self.pending[slot]
            # Whatever is wanted by now: it must first be known whether that machine is there.
            if now_s - since_s <= self.limits.listing_lag_s:
                return order
        one = self._slots[slot]
        if one.failed:
            return Order(slot, one.incarnation, market, one.attempt, self.avoided_pools(market, now_s), self.run)
        return Order(slot, one.incarnation + 1, market, 0, self.avoided_pools(market, now_s), self.run)

    def launches_left(self, now_s: float) -> tuple[int, int, int]:
        """How many launches this minute still bears, and among them how many on spot and how many fallbacks.

        Tries in vain count against spot only.
        """
        self._launched_s = [at_s for at_s in self._launched_s if now_s - at_s < 60]
        self._failed_launches_s = [at_s for at_s in self._failed_launches_s if now_s - at_s < 60]
        self._fallbacks_s = [at_s for at_s in self._fallbacks_s if now_s - at_s < 60]
        left = max(0, int(self.limits.launches_per_min) - len(self._launched_s))
        fallbacks = max(0, int(self.limits.fallbacks_per_min) - len(self._fallbacks_s))
        return left, max(0, left - len(self._failed_launches_s)), fallbacks

    # --- kept over restarts

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "slots": [
                {
                    "incarnation": one.incarnation,
                    "attempt": one.attempt,
                    "failed": one.failed,
                    "retry_at_s": one.retry_at_s,
                    "early": one.early,
                    "no_spot_s": one.no_spot_s if math.isfinite(one.no_spot_s) else None,
                    "no_capacity": one.no_capacity,
                }
                for one in self._slots
            ],
            "pending": [
                {
                    "slot": order.slot,
                    "incarnation": order.incarnation,
                    "market": order.market,
                    "attempt": order.attempt,
                    "avoid": sorted(order.avoid),
                    "run": order.run,
                    "since_s": since_s,
                }
                for order, since_s in self.pending.values()
            ],
            "no_capacity_s": self._no_capacity_s if math.isfinite(self._no_capacity_s) else None,
            "launches_from_s": self.launches_from_s if math.isfinite(self.launches_from_s) else None,
            "avoided_pools": self._avoided_pools,
            "quota": self._quota,
            "launched_s": self._launched_s,
            "failed_launches_s": self._failed_launches_s,
            "fallbacks_s": self._fallbacks_s,
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from what `to_dict` gave. A stop is forgotten: a new start is a person's word that it is mended.

        Raises:
            KeyError, TypeError, ValueError: it is not that, or of another number of slots.
        """
        if len(kept["slots"]) != len(self._slots):
            raise ValueError(f"expected {len(self._slots)} slots, got {len(kept['slots'])}")
        self._slots = [
            _SlotAttempts(
                incarnation=int(one["incarnation"]),
                attempt=int(one["attempt"]),
                failed=bool(one["failed"]),
                retry_at_s={market: float(at_s) for market, at_s in one["retry_at_s"].items()},
                early=int(one["early"]),
                no_spot_s=-math.inf if one["no_spot_s"] is None else float(one["no_spot_s"]),
                no_capacity=bool(one["no_capacity"]),
            )
            for one in kept["slots"]
        ]
        self.pending = {
            int(one["slot"]): (
                Order(
                    int(one["slot"]),
                    int(one["incarnation"]),
                    one["market"],
                    int(one["attempt"]),
                    frozenset(one["avoid"]),
                    str(one.get("run", "")),
                ),
                float(one["since_s"]),
            )
            for one in kept["pending"]
        }
        self._no_capacity_s = -math.inf if kept["no_capacity_s"] is None else float(kept["no_capacity_s"])
        self.launches_from_s = -math.inf if kept["launches_from_s"] is None else float(kept["launches_from_s"])
        self._avoided_pools = {
            market: {str(pool): float(until_s) for pool, until_s in kept["avoided_pools"][market].items()}
            for market in self._avoided_pools
        }
        self._quota = {market: float(until_s) for market, until_s in kept["quota"].items()}
        self._launched_s, self._fallbacks_s = list(kept["launched_s"]), list(kept["fallbacks_s"])
        self._failed_launches_s = list(kept["failed_launches_s"])


# --- the decision ---------------------------------------------------------------------------------------------------


def reconcile(status: FleetStatus, launch_state: LaunchState, limits: LaunchLimits, now_s: float) -> list[FleetAction]:
    """What to do now, in the order in which to do it: ends first, then launches, slots without a machine first.

    Nothing is done or remembered here; `LaunchState` is told by whoever acts.
    """
    by_slot: dict[int, list[Instance]] = {}
    for one in status.instances:
        if one.is_alive:
            by_slot.setdefault(one.slot, []).append(one)
    actions: list[FleetAction] = []
    requests: list[tuple[int, int, Market, str, bool]] = []
    # One slot finds out whether on-demand is any better, so that a mistake in both is known at the start of a job.
    probing = launch_state.is_closed("spot", now_s)
    for slot in sorted(by_slot.keys() - range(len(status.wanted))):
        actions += [_end(one, "no such slot") for one in by_slot[slot] if one.notice_s is None]
    for slot, market in enumerate(status.wanted):
        found = _SlotInstances(slot, by_slot.get(slot, []), status, limits)
        if market is None:
            actions += [_end(one, status.reasons[slot]) for one in found.alive if one.notice_s is None]
            continue
        target = _available_market(slot, market, launch_state, now_s)
        if probing and target == "spot" and not any(one.market == "spot" for one in found.alive):
            target, probing = "on_demand", False
        ends, request = found.decide(target)
        actions += ends
        if isinstance(request, Wait):
            actions.append(request)
        elif request is not None:
            why = status.reasons[slot] if target == market else f"{market} is not available: {target}"
            requests.append((found.rank, slot, target, f"{request}; {why}", found.falls_back(target)))
    actions += _admit(sorted(requests), status, launch_state, now_s)
    actions = [_defer_unlisted(action, status) for action in actions]
    return sorted(actions, key=lambda action: not isinstance(action, Terminate))


def _available_market(slot: int, market: Market, launch_state: LaunchState, now_s: float) -> Market:
    """On-demand that is closed, or whose quota is used up, gives way to spot; else the planner decides."""
    closed = now_s < launch_state.quota_s("on_demand") or launch_state.is_closed("on_demand", now_s)
    if market == "on_demand" and closed and now_s >= launch_state.blocked_s(slot, "spot"):
        return "on_demand" if launch_state.is_closed("spot", now_s) else "spot"
    return market


def _end(instance: Instance, why: str) -> Terminate:
    return Terminate(instance.id, instance.slot, why)


def _defer_unlisted(action: FleetAction, status: FleetStatus) -> FleetAction:
    """An instance that is not listed yet may have a notice that cannot be seen: it is ended once it is listed."""
    if isinstance(action, Terminate) and action.id in status.unlisted:
        return Wait(action.slot, f"{action.id} is not listed yet, it is ended later: {action.why}")
    return action


class _SlotInstances:
    """The machines of one slot."""

    def __init__(self, slot: int, alive: Collection[Instance], status: FleetStatus, limits: LaunchLimits) -> None:
        self.alive = sorted(alive, key=lambda one: (one.incarnation, one.launched_s, one.id))
        self._slot = slot
        self._ready = status.ready_s
        self._unhealthy = {one.id: why for one in self.alive if (why := _unhealthy_reason(one, status, limits))}
        ready = [one for one in self.alive if one.id in status.ready_s]
        self._serving = ready[-1] if ready else None
        # A worker that has had the slot fences what is older, also when its own machine is gone by now.
        self._fenced_below = max(
            status.held.get(slot, 0), self._serving.incarnation if self._serving is not None else 0
        )

    @property
    def rank(self) -> int:
        """Who comes first where not all can be launched: those that cannot work at all."""
        return 2 if self._serving is not None and self._serving.notice_s is None else 1 if self.alive else 0

    def falls_back(self, target: Market) -> bool:
        """To launch there would be a move from spot to on-demand."""
        return target == "on_demand" and any(one.market == "spot" for one in self.alive)

    def decide(self, target: Market) -> tuple[list[Terminate], Wait | str | None]:
        """Which machines to end; and why one is to be launched, or what is waited for, or neither."""
        old = [one for one in self.alive if one.incarnation < self._fenced_below]
        ends = [_end(one, f"incarnation {self._fenced_below} has taken over") for one in old if one.notice_s is None]
        rest = [one for one in self.alive if one.incarnation >= self._fenced_below]
        fit = [one for one in rest if one.notice_s is None and one.id not in self._unhealthy and one.market == target]
        if fit:
            keep = self._serving if self._serving in fit else fit[-1]
            assert keep is not None
            # Older ones stay until it is ready; what came later, or beside it, is of a plan that has changed.
            extra = [
                one for one in rest if one.incarnation >= keep.incarnation and one is not keep and one.notice_s is None
            ]
            ends += [_end(one, f"incarnation {keep.incarnation} is what is wanted") for one in extra]
            return ends, None if keep.id in self._ready else Wait(
                self._slot, f"incarnation {keep.incarnation} ({target}) boots"
            )
        if len(self.alive) < 2:
            return ends, self._launch_reason()
        # No third machine: one that does no good makes room.
        useless = [one for one in rest if one.id in self._unhealthy and one.notice_s is None]
        if not useless and self._serving is not None and self._serving.notice_s is None:
            useless = [one for one in rest if one.incarnation > self._serving.incarnation and one.notice_s is None]
        ends += [_end(one, self._unhealthy.get(one.id, f"{target} is wanted instead")) for one in useless[-1:]]
        return ends, Wait(self._slot, f"{target} is wanted, but two machines are there")

    def _launch_reason(self) -> str:
        """Why a machine is to be launched, where there is no fit one and at most one in all."""
        if not self.alive:
            return "no machine"
        one = self.alive[0]
        if one.notice_s is not None:
            return f"incarnation {one.incarnation} has its notice"
        return (
            f"incarnation {one.incarnation} {self._unhealthy[one.id]}"
            if one.id in self._unhealthy
            else f"from {one.market}"
        )


def _unhealthy_reason(one: Instance, status: FleetStatus, limits: LaunchLimits) -> str:
    waited_s = status.waited_s.get(one.id, 0.0)
    if waited_s > limits.boot_timeout_s:
        return f"is not ready after {waited_s:.0f} s"
    silent_s = status.silent_s.get(one.id, 0.0)
    if silent_s > limits.silence_timeout_s:
        return f"has been silent for {silent_s:.0f} s"
    return ""


def _admit(
    requests: Sequence[tuple[int, int, Market, str, bool]], status: FleetStatus, launch_state: LaunchState, now_s: float
) -> list[FleetAction]:
    """The launches that limits, pauses and budget allow now; the other requests wait, and say what for."""
    actions: list[FleetAction] = []
    launches, spot_launches, fallbacks = launch_state.launches_left(now_s)
    spare_usd = status.spare_usd
    for _, slot, market, why, falls_back in requests:
        until_s = launch_state.blocked_s(slot, market)
        commit_usd = status.commit_usd.get(market, 0.0)
        if launch_state.stopped:
            actions.append(Wait(slot, f"stopped: {launch_state.stopped}"))
        elif now_s < launch_state.launches_from_s:
            actions.append(
                Wait(
                    slot,
                    f"{launch_state.launches_from_s - now_s:.0f} s more until all that was launched is listed; {why}",
                )
            )
        elif now_s < until_s:
            actions.append(Wait(slot, f"no {market} for {until_s - now_s:.0f} s more; {why}"))
        elif (
            launches <= 0
            or (market == "spot" and spot_launches <= 0)
            or (falls_back and fallbacks <= 0 and not status.urgent)
        ):
            actions.append(Wait(slot, f"enough launches for this minute; {why}"))
        elif commit_usd > spare_usd:
            actions.append(Wait(slot, f"the budget has {max(0.0, spare_usd):.4f} USD to spare; {why}"))
        else:
            actions.append(Launch(launch_state.next_order(slot, market, now_s), why))
            launches, fallbacks, spare_usd = launches - 1, fallbacks - falls_back, spare_usd - commit_usd
            spot_launches -= market == "spot"
    return actions
