"""What a fault does: a function for each action. A new fault is an entry in `ACTIONS` and in `FAULT_KINDS` of the plan.

An action returns whether it has injected the fault. If not, its target is not there now, and it is tried again later.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from doll.control.redis_streams import streams_pattern
from doll.drill import second_run
from doll.drill.late_copies import LateCopies
from doll.drill.metadata_service import FakeMetadataService
from doll.drill.plan import Fault, FaultAction
from doll.drill.recovery import InjectedFault, PoisonTracker, RecoveryTracker
from doll.drill.stream import SamplesTopic, poison_for
from doll.errors import DollError, ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.reader import Partition
from doll.local.processes import end, tail
from doll.process.children import children_of
from doll.records.control import Grant, Settle
from doll.run.folder import JOB
from doll.storage.redis_client import delete_keys

if TYPE_CHECKING:
    from pathlib import Path

    from doll.config import JobConfig
    from doll.drill.routes import RoleRelays
    from doll.local.processes import LocalServer
    from doll.local.stack import Stack
    from doll.local.supervisor import Handle, RoleSpec, Supervisor

_EXIT_TIMEOUT_S: Final = 90.0
_KEPT_SHARE: Final = 0.7  # of a log's newest segment
_DERIVED: Final = (".index", ".timeindex", ".snapshot")


class DrillError(DollError):
    """The job does not recover from a fault, or a replaced process does not exit."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A process that a fault hits.

    Attributes:
        name: `worker-3`, `stage 2 of worker-3`, `redis`.
        role: the supervised role that it is or belongs to; "" for a service, which `doll up` restarts.
        send: sends it a signal.
    """

    name: str
    role: str
    send: Callable[[int], None]


@dataclass(frozen=True, eq=False, slots=True)
class Effect:
    """What a fault goes on doing after its injection.

    Attributes:
        on: name of the process that the effect keeps from working; "" where it keeps none.
        poll: whether the effect is over at a time; called several times a second, and not again after that.
        close: undoes the effect, since the drill ends.
    """

    on: str
    poll: Callable[[float], bool]
    close: Callable[[], object]
    is_control_cut: bool = False


@dataclass(slots=True)
class Scene:
    """The running job as a fault finds it.

    Attributes:
        metadata: serves interruption notices to the workers; None: no notices, and no faults of them.
        copies: of the commands that the server has sent so far.
        say: called with what each fault does.
        now: wall clock in seconds, as in `Update.time_s`.
        leader_pid: of two parameter servers, the process that leads; None where there is one server.
        effects: what earlier faults still do.
    """

    config: JobConfig
    supervisor: Supervisor
    stack: Stack
    relays: RoleRelays
    metadata: FakeMetadataService | None
    run_folder: Path
    topic: SamplesTopic
    copies: LateCopies
    recoveries: RecoveryTracker
    say: Callable[[Fault, str], None]
    now: float = 0.0
    leader_pid: int | None = None
    effects: list[Effect] = field(default_factory=list)

    def poll(self, now: float) -> None:
        """Go on with what earlier faults do.

        Raises:
            DrillError: a process does not exit, or a second run has failed.
        """
        self.now = now
        self.topic.poll()
        self.copies.poll(now)
        for effect in list(self.effects):
            if effect.poll(now):
                self.effects.remove(effect)

    def close(self) -> None:
        """Undo what earlier faults still do. It may be called again."""
        for effect in self.effects:
            effect.close()
        self.effects.clear()
        self.copies.close()

    def inject(self, fault: Fault) -> bool:
        """Inject the fault; False if its target is down, frozen, cut off or leaving now."""
        if any(effect.on == self._role(fault) for effect in self.effects):
            return False
        if fault.kind.cut_from == "control" and any(effect.is_control_cut for effect in self.effects):
            return False  # a cut of the server's links includes the links of each worker
        return ACTIONS[fault.kind.action](self, fault)

    def record(self, fault: Fault, target: str, poison: PoisonTracker | None = None) -> InjectedFault:
        """Note that the fault is injected now."""
        self.say(fault, target)
        return self.recoveries.inject(fault, self.now, poison)

    def suspend(self, victim: Victim, fault: Fault, release: Callable[[], None]) -> None:
        """The victim is frozen or cut off until `release` is called, after the fault's time."""
        until_s = self.now + fault.hold_s

        def poll(now: float) -> bool:
            if now >= until_s:
                release()
            return now >= until_s

        self.effects.append(Effect(victim.name, poll, release, is_control_cut=fault.kind.cut_from == "control"))

    def expect_exit(
        self,
        process: tuple[RoleSpec, Handle],
        what: str,
        *,
        after_s: float = 0.0,
        hurry: Callable[[], None] = lambda: None,
        on_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """A process is not supervised any more, and must exit by itself; then its successor starts, if none runs yet.

        Args:
            what: has happened to the process, for the error.
            after_s: from now, the time from which it can exit.
            hurry: called until it exits.
            on_exit: called when it has.
        """
        spec, handle = process
        by_s = self.now + after_s + _EXIT_TIMEOUT_S
        is_replaced = spec.name in self.supervisor.exit_codes()

        def poll(now: float) -> bool:
            hurry()
            if handle.poll() is not None:
                on_exit()
                if not is_replaced:
                    self.supervisor.start(spec)
            elif is_replaced and self.supervisor.exit_codes().get(spec.name) == 0:
                # It was frozen before it joined, and has joined since: its session is newer: the successor has left.
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

    def await_end(
        self, injected: InjectedFault, is_over: Callable[[], bool], close: Callable[[], object] = lambda: None
    ) -> None:
        """The fault is not done before `is_over` is true."""
        injected.is_done = False

        def poll(now: float) -> bool:
            if is_over():
                injected.is_done, injected.done_s = True, now
            return injected.is_done

        self.effects.append(Effect("", poll, close))

    def victim(self, fault: Fault) -> Victim | None:
        """The process that a fault hits; None while it does not run, and for a stage whose worker is frozen."""
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
        stages = children_of(handle.pid)
        pipeline = self.config.worker.pipeline
        if pipeline is None or len(stages) != pipeline.stages or any(e.on.endswith(role) for e in self.effects):
            return None  # the worker has just started, or is about to end
        return Victim(f"stage {fault.stage + 1} of {role}", role, partial(os.kill, stages[fault.stage]))

    def _role(self, fault: Fault) -> str:
        """Name of the process; of two parameter servers the leader's."""
        if fault.kind.target != "ps" or self.leader_pid is None:
            return fault.role
        leading = (name for name, handle in self.supervisor.handles().items() if handle.pid == self.leader_pid)
        return next(leading, "the leader, which is dead")

    @property
    def is_kafka_frozen(self) -> bool:
        """Whether a broker is frozen: a request to it would wait until it continues."""
        return any(effect.on == "kafka" or effect.on.startswith("broker-") for effect in self.effects)


def _service(name: str, server: LocalServer | None) -> Victim | None:
    if server is None or (pid := server.pid) is None:
        return None
    return Victim(name, "", lambda number: server.kill() if number == signal.SIGKILL else os.kill(pid, number))


Action = Callable[[Scene, Fault], bool]


def _on_process(act: Callable[[Scene, Victim, InjectedFault], None]) -> Action:
    """The action that does `act` to the process that the fault hits."""

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
        with contextlib.suppress(ProcessLookupError):  # it was killed while frozen
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
    """A stage takes its worker along. A stage that runs again before its worker gives it up loses nothing."""
    victim.send(signal.SIGTERM)
    scene.expect_exit(scene.supervisor.release(victim.role), "was asked to leave")


@_on_process
def _warn(scene: Scene, victim: Victim, injected: InjectedFault) -> None:
    metadata, role = scene.metadata, victim.role
    assert metadata is not None, "the plan excludes this kind"
    metadata.serve_bad_notice(role, injected.fault.number)
    injected.is_done = False

    def warn_again() -> None:
        if metadata.num_bad_notices_served(role):
            metadata.serve_notice(role)  # a worker that still polls after a malformed notice leaves

    def clear() -> None:
        metadata.clear_notice(role)
        injected.is_done = True

    what = "was asked to leave by a notice that followed a malformed one"
    scene.expect_exit(scene.supervisor.release(role), what, hurry=warn_again, on_exit=clear)


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


def _lose_tail(scene: Scene, fault: Fault) -> bool:
    """Kill a broker, and cut off the end of its copy of a partition that another broker leads."""
    assert scene.stack.kafka is not None
    nodes = scene.stack.kafka.nodes
    partition = Partition(scene.config.topic("samples"), fault.worker)
    if scene.is_kafka_frozen:
        return False
    try:
        followers = topics.followers(scene.config, scene.stack.services, partition.topic, partition.number)
    except ServiceUnavailableError:
        return False
    if not followers or any(node.pid is None for node in nodes):
        return False  # a copy is behind
    broker = fault.broker + 1 if fault.broker + 1 in followers else followers[0]
    nodes[broker - 1].kill()  # `doll up` restarts it
    truncate_log(nodes[broker - 1].log_path.parent, partition, _KEPT_SHARE)
    scene.record(fault, f"broker-{broker} of {partition}")
    return True


def truncate_log(broker_folder: Path, partition: Partition, share: float) -> None:
    """Keep the first `share` of the bytes of a partition's newest segment, as a power loss without fsync may.

    The broker must have been killed (`LocalKafka.kill`); it rebuilds its indexes when it is started again.

    Args:
        broker_folder: the folder of a `LocalKafka`.

    Raises:
        FileNotFoundError: the broker has no log of `partition`.
    """
    logs = sorted(broker_folder.rglob(f"{partition.topic}-{partition.number}/*.log"))
    if not logs:
        raise FileNotFoundError(f"{broker_folder}: expected a log of {partition}")
    os.truncate(logs[-1], int(logs[-1].stat().st_size * share))
    for file in logs[-1].parent.iterdir():
        if file.suffix in _DERIVED:
            file.unlink()


def _poison(scene: Scene, fault: Fault) -> bool:
    """Send records to a stream that cannot be decoded, or that would break the model."""
    poison = poison_for(scene.config, fault.number)
    assert poison is not None, "the plan excludes this kind"
    tracker = PoisonTracker(fault.worker, len(poison.records), poison.harmless)
    on_offset = partial(scene.recoveries.add_poison_offset, scene.record(fault, fault.role, tracker))
    for value in poison.records:
        scene.topic.put(fault.worker, value, on_offset)
    return True


def _bomb(scene: Scene, fault: Fault) -> bool:
    """Send a record to a stream that is too long when it is unpacked."""
    injected = scene.record(fault, fault.role, PoisonTracker(fault.worker, records=1))
    scene.topic.put_bomb(fault.worker, fault.number, partial(scene.recoveries.add_poison_offset, injected))
    return True


def _send_copies(command: type[Grant | Settle], scene: Scene, fault: Fault) -> bool:
    until_s = scene.now + fault.hold_s
    is_delivered = scene.copies.send_later(fault.worker, command, until_s, scene.now, fault.number)
    if is_delivered is None:
        return False  # no such command has come yet
    scene.await_end(scene.record(fault, fault.role), is_delivered)
    return True


def _delete_streams(scene: Scene, fault: Fault) -> bool:
    """Delete the control streams of this job, and nothing else, from Redis."""
    if not delete_keys(scene.stack.services, streams_pattern(scene.config.job)):
        return False  # Redis does not answer, or nobody has a link through it now
    scene.record(fault, fault.role)
    return True


def _start_second_run(scene: Scene, fault: Fault) -> bool:
    """Start another run of the job name on this run's Redis; the fault ends when that run has succeeded."""
    folder = scene.run_folder / f"second-run-{fault.number}"
    folder.mkdir()
    run = second_run.start(scene.run_folder / JOB, folder, scene.stack.services.redis)

    def has_ended() -> bool:
        code = run.poll()
        if code:
            raise DrillError(
                f"a second run of the job on the same Redis: expected exit code 0, got {code}; the end of "
                f"its log:\n{tail(folder / 'second-run.log')}"
            )
        return code == 0

    scene.await_end(scene.record(fault, fault.role), has_ended, lambda: end(run, _EXIT_TIMEOUT_S))
    return True


ACTIONS: Final[Mapping[FaultAction, Action]] = {
    "kill": _kill,
    "freeze": _on_process(_freeze),
    "zombie": _zombie,
    "preempt": _preempt,
    "malformed_notice": _warn,
    "cut_kafka": _cut,
    "cut_redis": _cut,
    "cut_control": _cut,
    "truncate": _truncate,
    "lose_tail": _lose_tail,
    "poison": _poison,
    "bomb": _bomb,
    "late_grants": partial(_send_copies, Grant),
    "late_settles": partial(_send_copies, Settle),
    "delete_streams": _delete_streams,
    "second_run": _start_second_run,
}
