"""The job's instances: the fleet's listing merged with earlier knowledge, and the instances that are ready."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from doll.provisioner.fleets.port import EndReason, Instance, InstanceState
from doll.provisioner.kept_state import KeptState
from doll.provisioner.launch_state import LaunchState
from doll.provisioner.observation import Observed
from doll.provisioner.reconcile import Readiness


class InstanceTracker(KeptState):
    """Keeps the instances from one turn to the next.

    Attributes:
        known: instances, by id, that had not ended when last observed, or that have no final bill yet.
        unlisted: ids of known instances that are missing from the newest listing.
        pools: newest spot pool of each slot; "" before the first.
        ready_s: Unix time at which the instance's worker got its slot, by instance id.
        fenced_s: Unix time at which the next incarnation took the slot over, by instance id.
    """

    KEPT: ClassVar = {
        "pools": list[str], "ends_recorded": set[str], "failures_recorded": set[str], "noticed_s": dict[str, float],
        "ready_s": dict[str, float], "fenced_s": dict[str, float], "interruptions": int,
    }  # fmt: skip
    LATER: ClassVar = ("failures_recorded", "noticed_s")

    def __init__(self, num_slots: int) -> None:
        self.known: dict[str, Instance] = {}
        self.unlisted: Collection[str] = frozenset()
        self.pools = [""] * num_slots
        self.ready_s: dict[str, float] = {}
        self.fenced_s: dict[str, float] = {}
        self.interruptions = 0
        self._ends_recorded: set[str] = set()  # instances whose notice or end was counted
        self._failures_recorded: set[str] = set()  # instances that were counted as failed, alive or not
        self._noticed_s: dict[str, float] = {}  # when the interruption notice was first seen, by id

    def merge(self, listed: Sequence[Instance], now_s: float, listing_lag_s: float) -> list[Instance]:
        """Return the listed instances and the known ones that are not listed. Up to `listing_lag_s` after its launch,
        an instance may be missing from the listing; after that time, a missing instance counts as ended."""
        merged = {instance.id: instance for instance in listed}
        self.unlisted = self.known.keys() - merged.keys()
        for id_, known in self.known.items():
            if id_ in merged:
                # A notice is final, but a fleet object of a new process may not have read it yet. One that was stopped
                # and started, and not seen between, has a new time of its launch: it costs from the first one on.
                now = merged[id_]
                launched_s = now.launched_s if known.ended_s is not None else min(now.launched_s, known.launched_s)
                merged[id_] = replace(now, launched_s=launched_s, notice_s=now.notice_s or known.notice_s)
            else:
                is_new = now_s - known.launched_s <= listing_lag_s
                merged[id_] = known if is_new else _vanished(known, now_s)
        return list(merged.values())

    def record(self, instance: Instance, launch_state: LaunchState, now_s: float, *, server_runs: bool) -> bool:
        """Report an instance of one of the job's slots to `launch_state`. Returns whether a new interruption was seen.
        If no parameter server runs (`server_runs` is False), workers cannot join, and machines shut down. This does not
        count as a failure."""
        launch_state.seen(instance.slot, instance.incarnation)
        pending = launch_state.pending.get(instance.slot)
        identity = (instance.incarnation, instance.market)
        if pending is not None and (pending[0].incarnation, pending[0].market) == identity:
            launch_state.launched(pending[0])
        if instance.market == "spot" and instance.is_alive:
            self.pools[instance.slot] = instance.pool
        if instance.notice_s is not None:
            self._noticed_s.setdefault(instance.id, now_s)
        if instance.id in self._ends_recorded:
            return False
        if instance.is_limited and instance.end_reason is not EndReason.FAILED:
            return False  # its time is over as planned
        if instance.notice_s is not None or instance.end_reason is EndReason.INTERRUPTED:
            self._ends_recorded.add(instance.id)
            self.interruptions += 1
            launch_state.interrupted(instance, now_s if instance.ended_s is None else instance.ended_s)
            return True
        if instance.end_reason is EndReason.FAILED:
            self._ends_recorded.add(instance.id)
            ended_s = now_s if instance.ended_s is None else instance.ended_s
            if server_runs:
                self._failed(instance, f"ended by itself {ended_s - instance.launched_s:.0f} s after its launch",
                             launch_state, now_s)  # fmt: skip
        return False

    def _failed(self, instance: Instance, why: str, launch_state: LaunchState, now_s: float) -> None:
        if instance.id not in self._failures_recorded:
            self._failures_recorded.add(instance.id)
            why += f": {instance.trouble}" if instance.trouble else ""
            launch_state.instance_failed(instance, why, now_s)

    def record_health(
        self, instances: Sequence[Instance], readiness: Readiness, launch_state: LaunchState, now_s: float
    ) -> None:
        """Report to `launch_state` the slots whose running machines fail, and those whose machines are healthy."""
        limits = launch_state.limits
        for instance in instances:
            if not instance.is_alive or not 0 <= instance.slot < len(self.pools):
                continue
            if why := readiness.failure(instance.id, limits):
                self._failed(instance, why, launch_state, now_s)
            elif now_s - readiness.ready_s.get(instance.id, now_s) >= limits.healthy_s:
                launch_state.instance_works(instance.slot)

    def overdue(self, now_s: float, notice_timeout_s: float) -> frozenset[str]:
        """Return the ids of instances whose interruption notice was first seen more than `notice_timeout_s` ago."""
        return frozenset(id_ for id_, seen_s in self._noticed_s.items() if now_s - seen_s > notice_timeout_s)

    def launched(self, instance: Instance) -> None:
        """Record an instance that a launch has returned."""
        self.known[instance.id] = instance
        if instance.market == "spot":
            self.pools[instance.slot] = instance.pool

    def readiness(
        self, instances: Sequence[Instance], observed: Observed, now_s: float, *, boot_timeout_s: float
    ) -> Readiness:
        """Return the instances that work, according to the job's records. Boot times are reported to `observed`."""
        readiness = Readiness()
        ps_since_s = observed.ps_since_s(now_s)
        for slot in range(len(self.pools)):
            holder = observed.holder(slot)
            if holder is not None and holder.incarnation > 0:
                readiness.incarnation_held[slot] = holder.incarnation
        for instance in instances:
            if not (0 <= instance.slot < len(self.pools)) or instance.state is InstanceState.ENDED:
                continue
            holder = observed.holder(instance.slot)
            held = readiness.incarnation_held.get(instance.slot, 0)
            if holder is not None and held == instance.incarnation:
                if instance.id not in self.ready_s:
                    self.ready_s[instance.id] = max(holder.since_s, instance.launched_s)
                    boot_s = self.ready_s[instance.id] - instance.launched_s
                    # Without a parameter server no worker can join, so such a time is not a boot time.
                    if ps_since_s is not None and ps_since_s <= instance.launched_s and boot_s <= boot_timeout_s:
                        observed.boots.observe(boot_s)
                if not instance.is_alive:
                    continue
                if holder.works:
                    readiness.ready_s[instance.id] = self.ready_s[instance.id]
                else:
                    readiness.silent_s[instance.id] = max(0.0, observed.last_seen_s - holder.last_seen_s)
            elif holder is not None and held > instance.incarnation and instance.id in self.ready_s:
                self.fenced_s.setdefault(instance.id, holder.since_s)
            elif instance.is_alive and ps_since_s is not None:
                readiness.not_ready_s[instance.id] = now_s - max(instance.launched_s, ps_since_s)
        return readiness

    def forget_all_but(self, ids: Collection[str]) -> None:
        """Delete the times of instances that are neither known nor in `ids`."""
        kept = self.known.keys() | ids
        self._ends_recorded &= kept
        self._failures_recorded &= kept
        self._noticed_s = {id_: seen_s for id_, seen_s in self._noticed_s.items() if id_ in kept}
        self.ready_s = {id_: at_s for id_, at_s in self.ready_s.items() if id_ in kept}
        self.fenced_s = {id_: at_s for id_, at_s in self.fenced_s.items() if id_ in kept}

    def to_dict(self) -> dict[str, Any]:
        return {"known": msgspec.to_builtins(list(self.known.values())), **super().to_dict()}

    def restore(self, kept: Mapping[str, Any]) -> None:
        super().restore(kept)
        self.known = {fields["id"]: msgspec.convert(fields, Instance) for fields in kept["known"]}


def _vanished(instance: Instance, now_s: float) -> Instance:
    """Return an instance that is not listed any more, with its most likely end."""
    if instance.ended_s is not None:
        return replace(instance, state=InstanceState.ENDED)
    if instance.notice_s is not None and instance.notice_s <= now_s:
        return instance.ended(instance.notice_s, EndReason.LIMIT if instance.is_limited else EndReason.INTERRUPTED)
    reason = EndReason.TERMINATED if instance.state is InstanceState.ENDING else EndReason.FAILED
    return instance.ended(now_s, reason)
