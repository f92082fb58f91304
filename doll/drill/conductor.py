"""Injects a plan's faults into a running `doll up`, one after the other, and ends the job when all are recovered from.

It is called a few times a second and never waits itself. What it freezes it thaws, and a frozen process that has been
replaced (a zombie) must end by itself once it is thawed: where one lives on, the drill has failed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from doll.drill.metadata_service import FakeMetadataService
from doll.drill.plan import Fault, FaultTarget, make_plan
from doll.drill.recovery import InjectedFault, PoisonTracker, RecoveryTracker
from doll.drill.stream import SamplesTopic, poison_for
from doll.errors import DollError

if TYPE_CHECKING:
    from pathlib import Path

    from doll.config import JobConfig
    from doll.drill.routes import RoleRelays
    from doll.local.stack import Stack
    from doll.local.supervisor import Handle, RoleSpec, Supervisor
    from doll.records import AnyRecord
    from doll.services import Services

# Kafka's own start takes 7 s, and a minute on a machine with 20 processes to a core; beyond this nothing will come.
_RECOVERY_TIMEOUT_S: Final = 300.0
_EXIT_TIMEOUT_S: Final = 90.0
_SETTLE_S: Final = 3.0  # the job goes on for so long after the last recovery


class DrillError(DollError):
    """The job does not go on after a fault, or a replaced process lives on."""


@dataclass(slots=True)
class _Suspended:
    """A role that is frozen or cut off, and how to let go of it."""

    role: str
    release: Callable[[], None]
    at_s: float


@dataclass(slots=True)
class _LeavingProcess:
    """A process that no supervisor looks after and that must end by itself.

    A zombie's successor runs already; that of a process that was told to leave starts when it has left.
    """

    spec: RoleSpec
    handle: Handle
    by_s: float
    zombie: bool
    notice: InjectedFault | None = None  # it is to leave because of a notice; the first one cannot be read

    @property
    def role(self) -> str:
        return self.spec.name


class FaultInjector:
    """One drill.

    Args:
        faults: how many.
        say: told each fault.
        wires: what the roles' connections lead through.
        metadata: what tells the workers that spot takes them; None: nothing does.
        run_folder: where the job's checkpoints are, unless the job file says so.
        standby: there are two parameter servers, one of them waiting: faults are for the one that leads.
        clock: wall clock in seconds, as in `Update.time_s`.
    """

    def __init__(
        self,
        config: JobConfig,
        *,
        faults: int,
        seed: int,
        say: Callable[[str], None],
        wires: RoleRelays,
        run_folder: Path,
        metadata: FakeMetadataService | None = None,
        standby: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.standby = standby
        self._role_relays = wires
        self._metadata = metadata
        self._run_folder = run_folder
        self._topic: SamplesTopic | None = None
        self._leader_pid = 0
        self._leader_term = 0
        self._config = config
        self._number = faults
        self._seed = seed
        self._say = say
        self._clock = clock
        self._plan: tuple[Fault, ...] = ()
        self._next = 0
        self._recoveries = RecoveryTracker()
        self._ready_s: float | None = None  # since when nothing is open
        self._learning = False
        self._suspended: list[_Suspended] = []
        self._leaving: list[_LeavingProcess] = []

    def feed(self, record: AnyRecord) -> None:
        """A record of the `updates` or `metrics` topic."""
        from doll.records import Metric, Update

        self._learning = self._learning or isinstance(record, Update)
        if isinstance(record, Metric) and record.source == "ps":
            term = int(record.values.get("term", 0))
            if term >= self._leader_term:
                self._leader_term, self._leader_pid = term, int(record.values.get("pid", 0))
        self._recoveries.feed(record)

    @property
    def advertised_ports(self) -> Sequence[Mapping[str, int]]:
        """As of `RoleRelays`."""
        return self._role_relays.advertised_ports

    def environment(self, role: str) -> Mapping[str, str]:
        """What a worker needs to ask for its notices."""
        if self._metadata is None or not role.startswith("worker-"):
            return {}
        return self._metadata.environment(role)

    def services(self, role: str, stack: Stack) -> Services:
        """As of `RoleRelays`."""
        return self._role_relays.services(role, stack)

    def turn(self, supervisor: Supervisor, stack: Stack) -> str | None:
        """Do what is due; why the job ends now, or None.

        Raises:
            DrillError: no update came for a long time after a fault, or a zombie does not end.
        """
        now = self._clock()
        if not self._plan:
            if not self._learning:
                return None
            self._topic = SamplesTopic(self._config, stack.services, self._run_folder)
            self._plan = self.plan_for(self._targets(stack), len(stack.kafka.nodes) if stack.kafka is not None else 1)
        assert self._topic is not None
        self._topic.poll()
        self._end_suspensions(now)
        self._check_leaving(supervisor, now)
        if late := [one for one in self._recoveries.open if now - one.waiting_since_s > _RECOVERY_TIMEOUT_S]:
            counted = " that counts its records as dead" if late[0].poison is not None else ""
            raise DrillError(
                f"no update{counted} for {now - late[0].waiting_since_s:.0f} s after fault {late[0].fault.number} "
                f"({late[0].fault.kind.name} of {late[0].fault.role}); expected one within {_RECOVERY_TIMEOUT_S:g} s"
            )
        if self._recoveries.open:
            self._ready_s = None
        elif self._ready_s is None:
            self._ready_s = now
        if self._next < len(self._plan):
            fault = self._plan[self._next]
            if self._is_due(fault, now) and self._inject(fault, supervisor, stack, now):
                self._next += 1
            return None
        calm = self._ready_s is not None and now - self._ready_s > _SETTLE_S
        return f"drill: {self._number} faults" if calm and self.is_recovered else None

    def plan_for(self, targets: Collection[FaultTarget], brokers: int) -> tuple[Fault, ...]:
        """What is injected, in order."""
        without = {"stream_poison"} if poison_for(self._config, 0) is None else set()
        return make_plan(
            self._number,
            self._seed,
            workers=self._config.data.workers,
            targets=targets,
            standby=self.standby,
            brokers=brokers,
            without=without | ({"worker_malformed_notice"} if self._metadata is None else set()),
        )

    @property
    def poisoned(self) -> list[tuple[int, int]]:
        """Partition and offset of each record that is dead by an update, of those that were put into the stream."""
        poisons = [one.poison for one in self._recoveries.injected if one.poison is not None]
        return [(poison.partition, offset) for poison in poisons for offset in sorted(poison.dead)]

    @property
    def is_recovered(self) -> bool:
        """Whether everything is recovered from, and nothing is frozen, cut off or leaving."""
        return not (self._recoveries.open or self._suspended or self._leaving)

    def close(self) -> None:
        """Leave nothing frozen or cut off, and no zombie; it may be repeated."""
        for held in self._suspended:
            held.release()
        for ending in self._leaving:
            ending.handle.kill()
        self._suspended, self._leaving = [], []

    def facts(self) -> dict[str, Any]:
        """What `report.json` says of the drill."""
        return {
            "drill_seed": self._seed,
            "faults_planned": self._number,
            "poisoned": self.poisoned,
            **self._recoveries.report(),
        }

    def log(self) -> list[dict[str, Any]]:
        """Every fault with its time and recovery, for a file."""
        return [
            {
                "number": one.fault.number, "kind": one.fault.kind.name, "role": one.fault.role, "time_s": one.time_s,
                "hold_s": round(one.fault.hold_s, 3), "overlapping": one.fault.overlapping, "recovery_s": one.recovery_s,
                **({"cut": one.fault.cut} if one.fault.kind.cut_from is not None else {}),
            }
            for one in self._recoveries.injected
        ]  # fmt: skip

    def _targets(self, stack: Stack) -> set[FaultTarget]:
        from doll.config import StdinSource

        targets: set[FaultTarget] = {"worker", "ps"}
        if self._config.source is not None and not isinstance(self._config.source, StdinSource):
            targets.add("producer")
        if self._config.evaluation.enabled:
            targets.add("evaluator")
        # Only what is ours to break.
        if stack.redis is not None:
            targets.add("redis")
        if stack.kafka is not None:
            targets |= {"kafka", "stream", "broker"}
        return targets

    def _is_due(self, fault: Fault, now: float) -> bool:
        if not self._recoveries.injected:
            return True
        if fault.overlapping:
            return now - self._recoveries.injected[-1].time_s >= fault.gap_s
        return self._ready_s is not None and now - self._ready_s >= fault.gap_s

    # --- breaking things

    def _inject(self, fault: Fault, supervisor: Supervisor, stack: Stack, now: float) -> bool:
        """Whether it was possible; otherwise its target is down, frozen or cut off, and it is tried again."""
        kind = fault.kind
        role = self._role(fault, supervisor)
        if any(held.role == role for held in self._suspended) or any(
            ending.role == role and not ending.zombie for ending in self._leaving
        ):
            return False
        if kind.target == "stream":
            return self._disturb_stream(fault, now)
        if kind.target in ("redis", "kafka", "broker"):
            nodes = stack.kafka.nodes if stack.kafka is not None else ()
            server = stack.redis if kind.target == "redis" else nodes[fault.broker]
            if server is None or server.pid is None:
                return False
            self._record_injection(fault, role, now)
            if kind.action == "kill":
                server.kill()  # whoever runs the job starts it again
            else:
                pid = server.pid
                self._freeze(role, fault.hold_s, now, lambda number: os.kill(pid, number))
            return True
        handle = supervisor.handles().get(role)
        if handle is None:
            return False
        self._record_injection(fault, role, now)
        supervisor.reset_failures(role)
        match kind.action:
            case "kill":
                handle.kill()
            case "freeze":
                self._freeze(role, fault.hold_s, now, handle.send_signal)
            case "zombie":
                self._freeze(role, fault.hold_s, now, handle.send_signal)
                spec, zombie = supervisor.release(role)
                supervisor.start(spec)
                self._leaving.append(_LeavingProcess(spec, zombie, now + fault.hold_s + _EXIT_TIMEOUT_S, zombie=True))
            case "preempt":
                handle.terminate()
                spec, leaving = supervisor.release(role)
                self._leaving.append(_LeavingProcess(spec, leaving, now + _EXIT_TIMEOUT_S, zombie=False))
            case "malformed_notice":
                assert self._metadata is not None
                self._metadata.serve_bad_notice(role, fault.number)
                spec, warned = supervisor.release(role)
                notice = self._recoveries.injected[-1]
                self._leaving.append(_LeavingProcess(spec, warned, now + _EXIT_TIMEOUT_S, zombie=False, notice=notice))
            case _:
                assert kind.cut_from is not None
                wires = self._role_relays.wires(role, kind.cut_from)
                for relay in wires:
                    relay.start_cut(fault.cut)

                def restore() -> None:
                    for relay in wires:
                        relay.restore()

                self._suspended.append(_Suspended(role, restore, now + fault.hold_s))
        return True

    def _disturb_stream(self, fault: Fault, now: float) -> bool:
        """Put a record into a stream that nobody can learn from, or delete what is durable of it."""
        assert self._topic is not None
        if fault.kind.action == "truncate":
            if any(held.role == "kafka" or held.role.startswith("broker-") for held in self._suspended):
                return False  # to wait for a frozen broker here would keep it frozen
            until = self._topic.truncate(fault.worker)
            if until is None:
                return False  # nothing is durable yet, or Kafka is away
            self._record_injection(fault, f"{fault.role} below offset {until}", now)
            return True
        poison = poison_for(self._config, fault.number)
        assert poison is not None, "the plan leaves it out"
        self._record_injection(
            fault, fault.role, now, PoisonTracker(fault.worker, len(poison.records), poison.harmless)
        )
        one = self._recoveries.injected[-1]
        for record in poison.records:
            self._topic.put(fault.worker, record, lambda offset: self._recoveries.add_poison_offset(one, offset))
        return True

    def _role(self, fault: Fault, supervisor: Supervisor) -> str:
        """Name of the process; of two parameter servers the one that leads."""
        if fault.kind.target != "ps" or not self.standby:
            return fault.role
        leading = (name for name, handle in supervisor.handles().items() if handle.pid == self._leader_pid)
        return next(leading, "the leader, which is dead")

    def _record_injection(self, fault: Fault, role: str, now: float, poison: PoisonTracker | None = None) -> None:
        self._recoveries.inject(fault, now, poison)
        self._ready_s = None
        what = f"{fault.kind.action} {role}"
        if fault.kind.cut_from is not None:
            what = f"cut {role} from {fault.kind.cut_from} ({fault.cut}, {fault.hold_s:.1f} s)"
        self._say(f"fault {fault.number} of {len(self._plan)}: {what}")

    def _freeze(self, role: str, hold_s: float, now: float, send: Callable[[int], None]) -> None:
        send(signal.SIGSTOP)

        def thaw() -> None:
            try:
                send(signal.SIGCONT)
            except ProcessLookupError:
                return  # it was killed while it was frozen

        self._suspended.append(_Suspended(role, thaw, now + hold_s))

    def _end_suspensions(self, now: float) -> None:
        for held in [held for held in self._suspended if now >= held.at_s]:
            self._suspended.remove(held)
            held.release()

    def _check_leaving(self, supervisor: Supervisor, now: float) -> None:
        for ending in list(self._leaving):
            if (
                ending.notice is not None
                and self._metadata is not None
                and self._metadata.num_bad_notices_served(ending.role)
            ):
                self._metadata.serve_notice(ending.role)  # whoever still asks after a bad notice will leave
            if ending.handle.poll() is not None:
                self._leaving.remove(ending)
                if ending.notice is not None and self._metadata is not None:
                    self._metadata.clear_notice(ending.role)
                    ending.notice.left = True
                if not ending.zombie:
                    supervisor.start(ending.spec)
            elif ending.zombie and supervisor.exit_codes().get(ending.role) == 0:
                # It was frozen before it had joined, and has joined now: it is the newer one, and the other has left.
                self._leaving.remove(ending)
                supervisor.adopt(ending.spec, ending.handle)
            elif now > ending.by_s:
                what = "was replaced" if ending.zombie else "was told to leave"
                if ending.notice is not None:
                    what += " by a notice, after one that could not be read,"
                raise DrillError(
                    f"{ending.role} (process {ending.handle.pid}) {what} and has not ended within {_EXIT_TIMEOUT_S:g} s"
                )
