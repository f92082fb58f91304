"""The actions of faults, one function each. To add a fault, add it to `ACTIONS` and to `FAULT_KINDS` of the plan.

An action returns whether it has injected the fault. If it has not, its target does not run now, and it is tried later.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from doll.control.redis_streams import streams_pattern
from doll.errors import DollError
from doll.storage.redis_client import delete_keys

from doll_lab.drill.plan import Fault, FaultAction
from doll_lab.drill.recovery import InjectedFault, PoisonTracker, RecoveryTracker
from doll_lab.drill.stream import SamplesTopic, poison_for

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.local.processes import LocalServer
    from doll.local.stack import Stack
    from doll.local.supervisor import Handle, RoleSpec, Supervisor

    from doll_lab.drill.routes import RoleRelays

_EXIT_TIMEOUT_S: Final = 90.0
_PROC: Final = Path("/proc")


class DrillError(DollError):
    """The job does not recover from a fault, or a replaced process does not exit."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A process that a fault hits.

    Attributes:
        name: name such as `worker-3`, `stage 2 of worker-3`, `redis`.
        role: the supervised role of the process; "" for a service, which `doll up` restarts.
        send: function that sends a signal to the process.
    """

    name: str
    role: str
    send: Callable[[int], None]


@dataclass(frozen=True, eq=False, slots=True)
class Effect:
    """The part of a fault that continues after its injection.

    Attributes:
        on: name of the process that the effect prevents from working; "" if there is none.
        poll: function that returns whether the effect is over at a time; called several times per second until it is.
        close: function that undoes the effect, because the drill ends.
    """

    on: str
    poll: Callable[[float], bool]
    close: Callable[[], object]
    is_control_cut: bool = False


@dataclass(slots=True)
class Scene:
    """The running job as a fault finds it.

    Attributes:
        say: function that is called with a description of each fault.
        now: wall clock in seconds, as in `Update.time_s`.
        leader_pid: process id of the leader of two parameter servers; None if there is one server.
        effects: effects of earlier faults that continue.
    """

    config: JobConfig
    supervisor: Supervisor
    stack: Stack
    relays: RoleRelays
    topic: SamplesTopic
    recoveries: RecoveryTracker
    say: Callable[[Fault, str], None]
    now: float = 0.0
    leader_pid: int | None = None
    effects: list[Effect] = field(default_factory=list)

    def poll(self, now: float) -> None:
        """Continue the effects of earlier faults.

        Raises:
            DrillError: a process does not exit.
        """
        self.now = now
        self.topic.poll()
        for effect in list(self.effects):
            if effect.poll(now):
                self.effects.remove(effect)

    def close(self) -> None:
        """Undo the effects of earlier faults that continue. May be called again."""
        for effect in self.effects:
            effect.close()
        self.effects.clear()

    def inject(self, fault: Fault) -> bool:
        """Inject the fault; return False if its target is down, frozen, cut off or leaving now."""
        if any(effect.on == self._role(fault) for effect in self.effects):
            return False
        if fault.kind.cut_from == "control" and any(effect.is_control_cut for effect in self.effects):
            return False  # a cut of the server's links includes the links of each worker
        return ACTIONS[fault.kind.action](self, fault)

    def record(self, fault: Fault, target: str, poison: PoisonTracker | None = None) -> InjectedFault:
        """Record that the fault is injected now."""
        self.say(fault, target)
        return self.recoveries.inject(fault, self.now, poison)

    def suspend(self, victim: Victim, fault: Fault, release: Callable[[], None]) -> None:
        """Record that the victim is frozen or cut off until `release` is called, after the fault's time."""
        until_s = self.now + fault.hold_s

        def poll(now: float) -> bool:
            if now >= until_s:
                release()
            return now >= until_s

        self.effects.append(Effect(victim.name, poll, release, is_control_cut=fault.kind.cut_from == "control"))

    def expect_exit(self, process: tuple[RoleSpec, Handle], what: str, *, after_s: float = 0.0) -> None:
        """Expect a process, which is not supervised any more, to exit; then its successor starts, if none runs yet.

        Args:
            what: event that happened to the process, for the error.
            after_s: seconds from now after which it can exit.
        """
        spec, handle = process
        by_s = self.now + after_s + _EXIT_TIMEOUT_S
        is_replaced = spec.name in self.supervisor.exit_codes()

        def poll(now: float) -> bool:
            if handle.poll() is not None:
                if not is_replaced:
                    self.supervisor.start(spec)
            elif is_replaced and self.supervisor.exit_codes().get(spec.name) == 0:
                # It was frozen before it joined and has joined since, so its session is newer: the successor has left.
                self.supervisor.adopt(spec, handle)
            elif now > by_s:
                raise DrillError(
                    f"{spec.name} (process {handle.pid}) {what}: expected its exit within {_EXIT_TIMEOUT_S:g} s, but "
                    "it still runs"
                )
            else:
                return False
            return True

        self.effects.append(Effect("" if is_replaced else spec.name, poll, handle.kill))

    def victim(self, fault: Fault) -> Victim | None:
        """Return the process that a fault hits; None if it does not run, or for a stage whose worker is frozen."""
        role = self._role(fault)
        nodes = self.stack.kafka.nodes if self.stack.kafka is not None else ()
        match fault.kind.target:
            case "redis":
                return _service(role, self.stack.redis)
            case "kafka" | "broker":
                return _service(role, nodes[fault.broker])
        handle = self.supervisor.handles().get(role)
        if handle is None:
            return None
        if fault.kind.target != "stage":
            return Victim(role, role, handle.send_signal)
        pipeline = self.config.worker.pipeline
        parents = [handle]
        if pipeline is not None and pipeline.remote:
            names = (f"stage-{role.removeprefix('worker-')}-{number}" for number in range(pipeline.stages))
            parents = [parent for name in names if (parent := self.supervisor.handles().get(name)) is not None]
        stages = [child for parent in parents for child in children_of(parent.pid)]
        if pipeline is None or len(stages) != pipeline.stages or any(e.on.endswith(role) for e in self.effects):
            return None  # the worker has just started, or is about to end
        return Victim(f"stage {fault.stage + 1} of {role}", role, partial(os.kill, stages[fault.stage]))

    def _role(self, fault: Fault) -> str:
        """Return the name of the process; for two parameter servers, the name of the leader."""
        if fault.kind.target != "ps" or self.leader_pid is None:
            return fault.role
        leading = (name for name, handle in self.supervisor.handles().items() if handle.pid == self.leader_pid)
        return next(leading, "the leader, which is dead")

    @property
    def is_kafka_frozen(self) -> bool:
        """Whether a broker is frozen, so that a request to it would wait until it continues."""
        return any(effect.on == "kafka" or effect.on.startswith("broker-") for effect in self.effects)


def children_of(pid: int, proc: Path = _PROC) -> list[int]:
    """Return the running processes that `pid` has started, oldest first; none if there is no /proc."""
    children: list[tuple[int, int]] = []
    for path in proc.glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may contain any text.
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        state, parent, started = fields[0], int(fields[1]), int(fields[19])
        if parent == pid and state != "Z":
            children.append((started, int(path.parent.name)))
    return [child for _, child in sorted(children)]


def _service(name: str, server: LocalServer | None) -> Victim | None:
    if server is None or (pid := server.pid) is None:
        return None
    return Victim(name, "", lambda number: server.kill() if number == signal.SIGKILL else os.kill(pid, number))


Action = Callable[[Scene, Fault], bool]


def _on_process(act: Callable[[Scene, Victim, InjectedFault], None]) -> Action:
    """Return the action that calls `act` with the process that the fault hits."""

    def inject(scene: Scene, fault: Fault) -> bool:
        victim = scene.victim(fault)
        if victim is None:
            return False
        injected = scene.record(fault, victim.name)
        if victim.role:
            scene.supervisor.reset_failures(victim.role)
        act(scene, victim, injected)
        return True

    return inject


@_on_process
def _kill(scene: Scene, victim: Victim, injected: InjectedFault) -> None:
    victim.send(signal.SIGKILL)


def _freeze(scene: Scene, victim: Victim, injected: InjectedFault) -> None:
    victim.send(signal.SIGSTOP)

    def thaw() -> None:
        with contextlib.suppress(ProcessLookupError):  # the process was killed while frozen
            victim.send(signal.SIGCONT)

    scene.suspend(victim, injected.fault, thaw)


@_on_process
def _zombie(scene: Scene, victim: Victim, injected: InjectedFault) -> None:
    _freeze(scene, victim, injected)
    process = scene.supervisor.release(victim.role)
    scene.supervisor.start(process[0])
    scene.expect_exit(process, "was replaced", after_s=injected.fault.hold_s)


@_on_process
def _preempt(scene: Scene, victim: Victim, injected: InjectedFault) -> None:
    """Preempt a process. A stage takes its worker along, unless it restarts before the worker gives it up."""
    victim.send(signal.SIGTERM)
    scene.expect_exit(scene.supervisor.release(victim.role), "was asked to leave")


@_on_process
def _cut(scene: Scene, victim: Victim, injected: InjectedFault) -> None:
    fault = injected.fault
    assert fault.kind.cut_from is not None
    relays = scene.relays.to(victim.role, fault.kind.cut_from)
    for relay in relays:
        relay.start_cut(fault.cut)

    def restore() -> None:
        for relay in relays:
            relay.restore()

    scene.suspend(victim, fault, restore)


def _truncate(scene: Scene, fault: Fault) -> bool:
    """Delete the records of a stream that are durable in the model."""
    until = None if scene.is_kafka_frozen else scene.topic.truncate(fault.worker)
    if until is None:
        return False  # nothing is durable yet, or Kafka does not answer
    scene.record(fault, f"{fault.role} below offset {until}")
    return True


def _poison(scene: Scene, fault: Fault) -> bool:
    """Send records to a stream that cannot be decoded, or that would break the model."""
    poison = poison_for(scene.config, fault.number)
    assert poison is not None, "the plan excludes this kind"
    tracker = PoisonTracker(fault.worker, len(poison.records), poison.harmless)
    on_offset = partial(scene.recoveries.add_poison_offset, scene.record(fault, fault.role, tracker))
    for value in poison.records:
        scene.topic.put(fault.worker, value, on_offset)
    return True


def _delete_streams(scene: Scene, fault: Fault) -> bool:
    """Delete only the control streams of this job from Redis."""
    if not delete_keys(scene.stack.services, streams_pattern(scene.config.job)):
        return False  # Redis does not answer, or nobody has a link through it now
    scene.record(fault, fault.role)
    return True


ACTIONS: Final[Mapping[FaultAction, Action]] = {
    "kill": _kill,
    "freeze": _on_process(_freeze),
    "zombie": _zombie,
    "preempt": _preempt,
    "cut_kafka": _cut,
    "cut_redis": _cut,
    "cut_control": _cut,
    "truncate": _truncate,
    "poison": _poison,
    "delete_streams": _delete_streams,
}
