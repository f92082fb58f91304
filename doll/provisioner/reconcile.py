"""Compares the existing with the wanted machines, and returns launches, terminations and waits, with reasons. Pure.

Rules for each slot:

- An instance is *ready* when its worker holds the slot, which fences all older instances. The older ones are ended
then, not before.
- A slot never has more than two instances. The second one only replaces the first.
- An instance with an interruption notice is replaced but not ended: the cloud ends it, and may not charge for it. If it
still exists long after its notice, it is ended.
- An instance whose worker has not joined in time is ended at once, because nothing depends on it. An instance whose
worker has gone silent is ended when its successor is ready, or when its slot is given up.
- Instances of unknown slots, instances of a finished job, and stopped instances are ended.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from doll.amounts import usd
from doll.provisioner.fleets.port import Instance, Order
from doll.provisioner.launch_state import LaunchLimits, LaunchState
from doll.provisioner.planning.state import Market


@dataclass(frozen=True)
class Launch:
    """Launch an instance with this order."""

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
    """Do nothing for this slot now."""

    slot: int
    why: str


FleetAction = Launch | Terminate | Wait


@dataclass(frozen=True)
class Readiness:
    """The instances that work.

    Attributes:
        ready_s: Unix time since which the instance's worker holds its slot, by instance id.
        silent_s: seconds for which a worker that has held its slot has sent nothing, by instance id.
        not_ready_s: seconds that an instance, which is not ready, has had to become ready, by instance id.
        incarnation_held: highest incarnation whose worker has held the slot, by slot.
    """

    ready_s: dict[str, float] = field(default_factory=dict)
    silent_s: dict[str, float] = field(default_factory=dict)
    not_ready_s: dict[str, float] = field(default_factory=dict)
    incarnation_held: dict[int, int] = field(default_factory=dict)

    def failure(self, id_: str, limits: LaunchLimits) -> str:
        """Return the reason why the instance must be replaced; "" if it need not be replaced."""
        not_ready_s, silent_s = self.not_ready_s.get(id_, 0.0), self.silent_s.get(id_, 0.0)
        if not_ready_s > limits.boot_timeout_s:
            return f"is not ready after {not_ready_s:.0f} s"
        return f"has been silent for {silent_s:.0f} s" if silent_s > limits.silence_timeout_s else ""


@dataclass(frozen=True)
class FleetStatus:
    """The fleet and its wanted state at one moment.

    Attributes:
        wanted: wanted market of each slot. None: no machine.
        reasons: reason for the wanted market of each slot.
        urgent: whether the deadline is in danger; fallbacks are then not limited.
        spare_usd: USD that launches may still use; infinite without a budget.
        commit_usd: USD that one launch uses, by market.
        unlisted: ids of launched instances that the fleet does not list yet. A notice for these would not be visible,
            so they are not ended before they are listed.
        overdue: ids of instances that are ended because their interruption notice is too old.
        hold: reason why nothing is launched now; "": launches are allowed.
    """

    wanted: Sequence[Market | None]
    reasons: Sequence[str]
    instances: Sequence[Instance]
    readiness: Readiness
    urgent: bool = False
    spare_usd: float = math.inf
    commit_usd: Mapping[Market, float] = field(default_factory=dict)
    unlisted: Collection[str] = frozenset()
    overdue: Collection[str] = frozenset()
    hold: str = ""


def reconcile(status: FleetStatus, launch_state: LaunchState, now_s: float) -> list[FleetAction]:
    """Return the actions of this turn in order: first terminations, then launches, with slots that have no machine
    first. This function changes nothing; the caller reports outcomes to `launch_state`."""
    by_slot: dict[int, list[Instance]] = {}
    actions: list[FleetAction] = []
    for instance in status.instances:
        if instance.is_alive and instance.id in status.overdue:
            actions.append(_end(instance, "it is still there long after its interruption notice"))
        elif instance.is_alive:
            by_slot.setdefault(instance.slot, []).append(instance)
        elif instance.is_endable:
            actions.append(_end(instance, "it is stopped, and its volume costs until it is ended"))
    requests: list[tuple[int, int, Market, str, bool]] = []
    # One slot tries on-demand if spot refuses: a configuration error in both markets shows at the start of a job.
    probing = launch_state.is_closed("spot", now_s)
    for slot in sorted(by_slot.keys() - range(len(status.wanted))):
        actions += [_end(instance, "no such slot") for instance in by_slot[slot] if instance.notice_s is None]
    for slot, market in enumerate(status.wanted):
        alive = by_slot.get(slot, [])
        if market is None:
            actions += [_end(instance, status.reasons[slot]) for instance in alive if instance.notice_s is None]
            continue
        slot_instances = _SlotInstances(slot, alive, status.readiness, launch_state.limits)
        target = _available_market(slot, market, launch_state, now_s)
        if probing and target == "spot" and not any(instance.market == "spot" for instance in alive):
            target, probing = "on_demand", False
        ends, request = slot_instances.decide(target)
        if launch_state.gave_up(slot) and isinstance(request, str):
            ends += slot_instances.failed
            request = Wait(slot, f"given up: {launch_state.slots[slot].failures} machines in a row failed")
        actions += ends
        if isinstance(request, Wait):
            actions.append(request)
        elif request is not None:
            why = status.reasons[slot] if target == market else f"{market} is not available: {target}"
            falls_back = slot_instances.falls_back(target)
            requests.append((slot_instances.rank, slot, target, f"{request}; {why}", falls_back))
    actions += _admit(sorted(requests), status, launch_state, now_s)
    actions = [_defer_unlisted(action, status) for action in actions]
    return sorted(actions, key=lambda action: not isinstance(action, Terminate))


def _available_market(slot: int, market: Market, launch_state: LaunchState, now_s: float) -> Market:
    """Return spot instead of on-demand if on-demand is closed or its quota is used up; otherwise the wanted market."""
    closed = now_s < launch_state.quota_s("on_demand") or launch_state.is_closed("on_demand", now_s)
    if market == "on_demand" and closed and now_s >= launch_state.blocked_s(slot, "spot"):
        return "on_demand" if launch_state.is_closed("spot", now_s) else "spot"
    return market


def _end(instance: Instance, why: str) -> Terminate:
    return Terminate(instance.id, instance.slot, why)


def _defer_unlisted(action: FleetAction, status: FleetStatus) -> FleetAction:
    """Replace the end of an unlisted instance by a wait, because the instance may have a notice that is not visible
    yet. It is ended after it is listed."""
    if isinstance(action, Terminate) and action.id in status.unlisted:
        return Wait(action.slot, f"{action.id} is not listed yet, it is ended later: {action.why}")
    return action


class _SlotInstances:
    """The machines of one slot."""

    def __init__(self, slot: int, alive: Collection[Instance], readiness: Readiness, limits: LaunchLimits) -> None:
        ordered = sorted(alive, key=lambda instance: (instance.incarnation, instance.launched_s, instance.id))
        expired = [
            instance
            for instance in ordered
            if instance.notice_s is None and readiness.not_ready_s.get(instance.id, 0.0) > limits.boot_timeout_s
        ]
        failures = {instance.id: readiness.failure(instance.id, limits) for instance in ordered}
        self._expired = [_end(instance, failures[instance.id]) for instance in expired]
        self.alive = [instance for instance in ordered if instance not in expired]
        self._slot = slot
        self._is_full = len(ordered) >= 2
        self._ready = readiness.ready_s
        self._unhealthy = {id_: why for id_, why in failures.items() if why}
        ready = [instance for instance in self.alive if instance.id in readiness.ready_s]
        self._serving = ready[-1] if ready else None
        # A worker that has had the slot fences older instances, also when its own machine is gone by now.
        serving = self._serving.incarnation if self._serving is not None else 0
        self._fenced_below = max(readiness.incarnation_held.get(slot, 0), serving)

    @property
    def rank(self) -> int:
        """The priority of the slot if limits do not allow all launches: slots without any machine come first."""
        return 2 if self._serving is not None and self._serving.notice_s is None else 1 if self.alive else 0

    @property
    def failed(self) -> list[Terminate]:
        """The terminations of the instances that must be replaced."""
        return [
            _end(instance, self._unhealthy[instance.id])
            for instance in self.alive
            if instance.id in self._unhealthy and instance.notice_s is None
        ]

    def falls_back(self, target: Market) -> bool:
        """Return whether a launch in `target` is a move from spot to on-demand."""
        return target == "on_demand" and any(instance.market == "spot" for instance in self.alive)

    def decide(self, target: Market) -> tuple[list[Terminate], Wait | str | None]:
        """Return the machines to end, and a reason to launch or wait; None if neither is needed."""
        fenced = [instance for instance in self.alive if instance.incarnation < self._fenced_below]
        rest = [instance for instance in self.alive if instance.incarnation >= self._fenced_below]
        endable = [instance for instance in rest if instance.notice_s is None]
        ends = self._expired + [
            _end(instance, f"incarnation {self._fenced_below} has taken over")
            for instance in fenced
            if instance.notice_s is None
        ]
        fit = [instance for instance in endable if instance.id not in self._unhealthy and instance.market == target]
        if fit:
            keep = self._serving if self._serving in fit else fit[-1]
            assert keep is not None
            # Older ones stay until it is ready; later ones, and ones beside it, belong to a plan that has changed.
            extra = [
                instance for instance in endable if instance.incarnation >= keep.incarnation and instance is not keep
            ]
            ends += [_end(instance, f"incarnation {keep.incarnation} is wanted") for instance in extra]
            return ends, None if keep.id in self._ready else Wait(
                self._slot, f"incarnation {keep.incarnation} ({target}) boots"
            )
        if not self._is_full:
            return ends, self._launch_reason()
        # No third machine: end one that is unhealthy or not needed first.
        useless = [instance for instance in endable if instance.id in self._unhealthy]
        if not useless and self._serving is not None and self._serving.notice_s is None:
            useless = [instance for instance in endable if instance.incarnation > self._serving.incarnation]
        ends += [
            _end(instance, self._unhealthy.get(instance.id, f"{target} is wanted instead")) for instance in useless[-1:]
        ]
        return ends, Wait(self._slot, f"{target} is wanted, but the slot has two machines")

    def _launch_reason(self) -> str:
        """Return the reason for a launch, if the slot has at most one machine and this machine is not suitable."""
        if not self.alive:
            return "no machine"
        instance = self.alive[0]
        if instance.notice_s is not None:
            return f"incarnation {instance.incarnation} has an interruption notice"
        if instance.id in self._unhealthy:
            return f"incarnation {instance.incarnation} {self._unhealthy[instance.id]}"
        return f"from {instance.market}"


def _admit(
    requests: Sequence[tuple[int, int, Market, str, bool]], status: FleetStatus, launch_state: LaunchState, now_s: float
) -> list[FleetAction]:
    """Return the launches that limits, pauses and budget allow now, and waits with reasons for the other requests."""
    actions: list[FleetAction] = []
    launches, spot_launches, fallbacks = launch_state.launches_left(now_s)
    spare_usd = status.spare_usd
    for _, slot, market, why, falls_back in requests:
        until_s, commit_usd = launch_state.blocked_s(slot, market), status.commit_usd.get(market, 0.0)
        unlisted_s = launch_state.launches_from_s - now_s
        none_left = launches <= 0 or (market == "spot" and spot_launches <= 0)
        holds = (  # the first true one counts
            (bool(launch_state.stopped), f"stopped: {launch_state.stopped}"),
            (bool(status.hold), f"{status.hold}; {why}"),
            (unlisted_s > 0, f"{unlisted_s:.0f} s until all earlier launches are listed; {why}"),
            (now_s < until_s, f"no {market} launch for {until_s - now_s:.0f} s; {why}"),
            (none_left or (falls_back and fallbacks <= 0 and not status.urgent),
             f"the limit of launches per minute is reached; {why}"),
            (commit_usd > spare_usd, f"the budget has {usd(max(0.0, spare_usd))} USD left; {why}"),
        )  # fmt: skip
        if (hold := next((text for holds_back, text in holds if holds_back), None)) is not None:
            actions.append(Wait(slot, hold))
            continue
        actions.append(Launch(launch_state.next_order(slot, market, now_s), why))
        launches, fallbacks, spare_usd = launches - 1, fallbacks - falls_back, spare_usd - commit_usd
        spot_launches -= market == "spot"
    return actions
