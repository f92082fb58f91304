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

from doll.drill.metadata_service import Metadata
from doll.drill.plan import Fault, Target, make_plan
from doll.drill.recovery import Injected, Poisoned, Recoveries
from doll.drill.stream import SamplesTopic, poison_for
from doll.errors import DollError

if TYPE_CHECKING:
    from pathlib import Path

    from doll.config import JobConfig
    from doll.drill.routes import Wires
    from doll.local.stack import Stack
    from doll.local.supervisor import Handle, RoleSpec, Supervisor
    from doll.records import AnyRecord
    from doll.services import Services

# Kafka's own start takes 7 s, and a minute on a machine with 20 processes to a core; beyond this nothing will come.
_PATIENCE_S: Final = 300.0
_ZOMBIE_S: Final = 90.0
_CALM_S: Final = 3.0  # the job goes on for so long after the last recovery


class DrillError(DollError):
    """The job does not go on after a fault, or a replaced process lives on."""


@dataclass(slots=True)
class _Held:
    """A role that is frozen or cut off, and how to let go of it."""

    role: str
    release: Callable[[], None]
    at_s: float


@dataclass(slots=True)
class _Ending:
    """A process that no supervisor looks after and that must end by itself.

    A zombie's successor runs already; that of a process that was told to leave starts when it has left.
    """

    spec: RoleSpec
    handle: Handle
    by_s: float
    zombie: bool
    notice: Injected | None = None  # it is to leave because of a notice; the first one cannot be read

    @property
    def role(self) -> str:
        return self.spec.name


class Conductor:
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
        wires: Wires,
        run_folder: Path,
        metadata: Metadata | None = None,
        standby: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.standby = standby
        self._wires = wires
        self._metadata = metadata
        self._run_folder = run_folder
        self._topic: SamplesTopic | None = None
        self._leader_pid = 0
        self._leader_epoch = 0
        self._config = config
        self._number = faults
        self._seed = seed
        self._say = say
        self._clock = clock
        self._plan: tuple[Fault, ...] = ()
        self._next = 0
        self._recoveries = Recoveries()
        self._ready_s: float | None = None  # since when nothing is open
        self._learning = False
        self._held: list[_Held] = []
        self._ending: list[_Ending] = []

    def feed(self, record: AnyRecord) -> None:
        """A record of the `updates` or `metrics` topic."""
        from doll.records import Metric, Update

        self._learning = self._learning or isinstance(record, Update)
        if isinstance(record, Metric) and record.source == "ps":
            epoch = int(record.values.get("ps_epoch", 0))
            if epoch >= self._leader_epoch:
                self._leader_epoch, self._leader_pid = epoch, int(record.values.get("pid", 0))
        self._recoveries.feed(record)

    @property
    def detours(self) -> Sequence[Mapping[str, int]]:
        """As of `Wires`."""
        return self._wires.detours

    def environment(self, role: str) -> Mapping[str, str]:
        """What a worker needs to ask for its notices."""
        if self._metadata is None or not role.startswith("worker-"):
            return {}
        return self._metadata.environment(role)

    def services(self, role: str, stack: Stack) -> Services:
        """As of `Wires`."""
        return self._wires.services(role, stack)

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
        self._let_go(now)
        self._see_ends(supervisor, now)
        if late := [one for one in self._recoveries.open if now - one.waiting_since_s > _PATIENCE_S]:
            counted = " that counts its records as dead" if late[0].poison is not None else ""
            raise DrillError(
                f"no update{counted} for {now - late[0].waiting_since_s:.0f} s after fault {late[0].fault.number} "
                f"({late[0].fault.kind.name} of {late[0].fault.role}); expected one within {_PATIENCE_S:g} s"
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
        calm = self._ready_s is not None and now - self._ready_s > _CALM_S
        return f"drill: {self._number} faults" if calm and self.is_calm else None

    def plan_for(self, targets: Collection[Target], brokers: int) -> tuple[Fault, ...]:
        """What is injected, in order."""
        without = {"stream_poison"} if poison_for(self._config, 0) is None else set()
        return make_plan(
            self._number,
            self._seed,
            workers=self._config.data.workers,
            targets=targets,
            standby=self.standby,
            brokers=brokers,
            without=without | ({"worker_bad_notice"} if self._metadata is None else set()),
        )

    @property
    def poisoned(self) -> list[tuple[int, int]]:
        """Partition and offset of each record that is dead by an update, of those that were put into the stream."""
        found = [one.poison for one in self._recoveries.injected if one.poison is not None]
        return [(poison.partition, offset) for poison in found for offset in sorted(poison.dead)]

    @property
    def is_calm(self) -> bool:
        """Whether everything is recovered from, and nothing is frozen, cut off or leaving."""
        return not (self._recoveries.open or self._held or self._ending)

    def close(self) -> None:
        """Leave nothing frozen or cut off, and no zombie; it may be repeated."""
        for held in self._held:
            held.release()
        for ending in self._ending:
            ending.handle.kill()
        self._held, self._ending = [], []

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
                "hold_s": round(one.fault.hold_s, 3), "hurried": one.fault.hurried, "recovery_s": one.recovery_s,
                **({"cut": one.fault.cut} if one.fault.kind.cut_from is not None else {}),
            }
            for one in self._recoveries.injected
        ]  # fmt: skip

    def _targets(self, stack: Stack) -> set[Target]:
        from doll.config import StdinSource

        targets: set[Target] = {"worker", "ps"}
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
        if fault.hurried:
            return now - self._recoveries.injected[-1].time_s >= fault.gap_s
        return self._ready_s is not None and now - self._ready_s >= fault.gap_s

    # --- breaking things

    def _inject(self, fault: Fault, supervisor: Supervisor, stack: Stack, now: float) -> bool:
        """Whether it was possible; otherwise its target is down, frozen or cut off, and it is tried again."""
        kind = fault.kind
        role = self._role(fault, supervisor)
        if any(held.role == role for held in self._held) or any(
            ending.role == role and not ending.zombie for ending in self._ending
        ):
            return False
        if kind.target == "stream":
            return self._meddle(fault, now)
        if kind.target in ("redis", "kafka", "broker"):
            nodes = stack.kafka.nodes if stack.kafka is not None else ()
            server = stack.redis if kind.target == "redis" else nodes[fault.broker]
            if server is None or server.pid is None:
                return False
            self._told(fault, role, now)
            if kind.action == "kill":
                server.kill()  # whoever runs the job starts it again
            else:
                pid = server.pid
                self._freeze(role, fault.hold_s, now, lambda number: os.kill(pid, number))
            return True
        handle = supervisor.handles().get(role)
        if handle is None:
            return False
        self._told(fault, role, now)
        supervisor.forgive(role)
        match kind.action:
            case "kill":
                handle.kill()
            case "freeze":
                self._freeze(role, fault.hold_s, now, handle.send_signal)
            case "zombie":
                self._freeze(role, fault.hold_s, now, handle.send_signal)
                spec, zombie = supervisor.release(role)
                supervisor.start(spec)
                self._ending.append(_Ending(spec, zombie, now + fault.hold_s + _ZOMBIE_S, zombie=True))
            case "preempt":
                handle.terminate()
                spec, leaving = supervisor.release(role)
                self._ending.append(_Ending(spec, leaving, now + _ZOMBIE_S, zombie=False))
            case "bad_notice":
                assert self._metadata is not None
                self._metadata.spoil(role, fault.number)
                spec, warned = supervisor.release(role)
                notice = self._recoveries.injected[-1]
                self._ending.append(_Ending(spec, warned, now + _ZOMBIE_S, zombie=False, notice=notice))
            case _:
                assert kind.cut_from is not None
                wires = self._wires.wires(role, kind.cut_from)
                for wire in wires:
                    wire.break_off(fault.cut)

                def mend() -> None:
                    for wire in wires:
                        wire.mend()

                self._held.append(_Held(role, mend, now + fault.hold_s))
        return True

    def _meddle(self, fault: Fault, now: float) -> bool:
        """Put a record into a stream that nobody can learn from, or delete what is durable of it."""
        assert self._topic is not None
        if fault.kind.action == "truncate":
            if any(held.role == "kafka" or held.role.startswith("broker-") for held in self._held):
                return False  # to wait for a frozen broker here would keep it frozen
            until = self._topic.truncate(fault.worker)
            if until is None:
                return False  # nothing is durable yet, or Kafka is away
            self._told(fault, f"{fault.role} below offset {until}", now)
            return True
        poison = poison_for(self._config, fault.number)
        assert poison is not None, "the plan leaves it out"
        self._told(fault, fault.role, now, Poisoned(fault.worker, len(poison.records), poison.harmless))
        one = self._recoveries.injected[-1]
        for record in poison.records:
            self._topic.put(fault.worker, record, lambda offset: self._recoveries.poisoned_at(one, offset))
        return True

    def _role(self, fault: Fault, supervisor: Supervisor) -> str:
        """Name of the process; of two parameter servers the one that leads."""
        if fault.kind.target != "ps" or not self.standby:
            return fault.role
        leading = (name for name, handle in supervisor.handles().items() if handle.pid == self._leader_pid)
        return next(leading, "the leader, which is dead")

    def _told(self, fault: Fault, role: str, now: float, poison: Poisoned | None = None) -> None:
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

        self._held.append(_Held(role, thaw, now + hold_s))

    def _let_go(self, now: float) -> None:
        for held in [held for held in self._held if now >= held.at_s]:
            self._held.remove(held)
            held.release()

    def _see_ends(self, supervisor: Supervisor, now: float) -> None:
        for ending in list(self._ending):
            if ending.notice is not None and self._metadata is not None and self._metadata.served(ending.role):
                self._metadata.take(ending.role)  # whoever still asks after a bad notice will leave
            if ending.handle.poll() is not None:
                self._ending.remove(ending)
                if ending.notice is not None and self._metadata is not None:
                    self._metadata.spare(ending.role)
                    ending.notice.left = True
                if not ending.zombie:
                    supervisor.start(ending.spec)
            elif ending.zombie and supervisor.exit_codes().get(ending.role) == 0:
                # It was frozen before it had joined, and has joined now: it is the newer one, and the other has left.
                self._ending.remove(ending)
                supervisor.adopt(ending.spec, ending.handle)
            elif now > ending.by_s:
                what = "was replaced" if ending.zombie else "was told to leave"
                if ending.notice is not None:
                    what += " by a notice, after one that could not be read,"
                raise DrillError(
                    f"{ending.role} (process {ending.handle.pid}) {what} and has not ended within {_ZOMBIE_S:g} s"
                )
