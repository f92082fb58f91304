"""The fleet port for workers with several machines, over a fleet that launches machines one by one.

An instance of this fleet is a gang: k machines of the other fleet, where worker n has the slots k n to k n + k - 1. All
are launched or none: where one is refused, those before it are ended. A gang is up when its last machine is, and ends
with its first; `reconcile` then releases the others. After a crash between two launches the same order completes the
gang; a gang that no order completes is ended. Everything is read from the listing of the machines: nothing is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from doll import telemetry
from doll.errors import ServiceUnavailableError
from doll.provisioner.fleets.port import EndReason, Fleet, Instance, InstanceState, LaunchError, LaunchFailure, Order

log = telemetry.get_logger(__name__)

_MAY_BE_REPEATED = (LaunchFailure.THROTTLED, LaunchFailure.TAKEN)


class GangFleet:
    """`Fleet` of gangs.

    Args:
        machines: launches single machines.
        machines_per_worker: k.
    """

    def __init__(self, machines: Fleet, machines_per_worker: int) -> None:
        self._machines = machines
        self._count = machines_per_worker
        self._launched: dict[str, tuple[Instance, ...]] = {}

    def launch(self, order: Order) -> Instance:
        members: list[Instance] = []
        for number in range(self._count):
            one = replace(order, slot=order.slot * self._count + number, machines=1)
            try:
                members.append(self._machines.launch(one))
            except LaunchError as error:
                if members and error.failure not in _MAY_BE_REPEATED:
                    self._undo(members)
                    error.used_up = True
                raise
        gang = gang_of(members, self._count)
        self._launched[gang.id] = gang.members
        return gang

    def instances(self) -> Sequence[Instance]:
        return gangs_of(self._machines.instances(), self._count)

    def terminate(self, ids: Collection[str]) -> None:
        members = {member.id: member for id_ in ids for member in self._launched.get(id_, ())}
        members |= {member.id: member for gang in self.instances() if gang.id in ids for member in gang.members}
        self._end(members.values())

    def close(self) -> None:
        self._machines.close()

    def _undo(self, members: Sequence[Instance]) -> None:
        try:
            self._end(members)
        except ServiceUnavailableError as error:
            # They are listed as a gang that lacks machines, and ended as that.
            log.warning("half_a_gang_is_left", ids=[member.id for member in members], error=str(error))

    def _end(self, members: Iterable[Instance]) -> None:
        """End these machines, but those with a notice: their owner does that."""
        if endable := [member.id for member in members if member.is_alive and member.notice_s is None]:
            self._machines.terminate(endable)


def gangs_of(machines: Sequence[Instance], machines_per_worker: int) -> list[Instance]:
    """The gangs that these machines are, in the order of their launches; some may lack machines.

    Machines are launched in the order of their numbers. A gang that has ended and lacks its first one is left out:
    it is so old that the listing forgets it, machine by machine.
    """
    by_incarnation: dict[tuple[int, int], list[list[Instance]]] = {}
    for machine in sorted(machines, key=lambda machine: machine.launched_s):
        groups = by_incarnation.setdefault((machine.slot // machines_per_worker, machine.incarnation), [[]])
        # An earlier run of the job may have used the incarnation: a second machine of one slot begins the next gang.
        if any(member.slot == machine.slot for member in groups[-1]):
            groups.append([])
        groups[-1].append(machine)
    gangs = [gang_of(group, machines_per_worker) for groups in by_incarnation.values() for group in groups]
    known = [
        gang
        for gang in gangs
        if gang.state is not InstanceState.ENDED or gang.members[0].slot % machines_per_worker == 0
    ]
    return sorted(known, key=lambda gang: gang.launched_s)


def gang_of(machines: Sequence[Instance], machines_per_worker: int) -> Instance:
    """The gang of these machines of one worker; fewer than k: it lacks some."""
    members = tuple(sorted(machines, key=lambda member: member.slot))
    notices = [member.notice_s for member in members if member.notice_s is not None]
    state = _state(members, whole=len(members) == machines_per_worker)
    ended = state is InstanceState.ENDED
    ends = [member.ended_s for member in members if member.ended_s is not None]
    lost = sorted((member for member in members if member.ended_s is not None), key=lambda member: member.ended_s or 0)
    first = members[0]
    return Instance(
        id=first.id, slot=first.slot // machines_per_worker, incarnation=first.incarnation, market=first.market,
        pool=(lost[0] if lost else first).pool, state=state, launched_s=min(member.launched_s for member in members),
        ended_s=max(ends) if ended else None, end_reason=_end_reason(members) if ended else EndReason.NONE,
        notice_s=min(notices, default=None), job=first.job, machines=machines_per_worker, members=members,
    )  # fmt: skip


def _state(members: Sequence[Instance], *, whole: bool) -> InstanceState:
    states = {member.state for member in members}
    if states == {InstanceState.ENDED}:
        return InstanceState.ENDED
    if not all(member.is_alive for member in members):
        return InstanceState.ENDING
    return InstanceState.RUNNING if whole and states == {InstanceState.RUNNING} else InstanceState.PENDING


def _end_reason(members: Sequence[Instance]) -> EndReason:
    """That of the machine with which the gang ended; the others were released."""
    reasons = {member.end_reason for member in members}
    for reason in (EndReason.INTERRUPTED, EndReason.FAILED):
        if reason in reasons:
            return reason
    return EndReason.TERMINATED


_fleet: type[Fleet] = GangFleet
