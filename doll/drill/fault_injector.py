"""Injects a plan's faults into a running `doll up`, in order, and ends the job when it has recovered from all of them.

It is called a few times a second and never blocks. Every process that it stops (SIGSTOP) it also continues. A stopped
process that was replaced meanwhile (a zombie) must exit by itself after SIGCONT; if it does not, the drill fails.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from doll.config import StdinSource
from doll.drill.data_faults import DataFaults, DrillError
from doll.drill.late_copies import LateCopies
from doll.drill.metadata_service import FakeMetadataService
from doll.drill.plan import Fault, FaultTarget, make_plan
from doll.drill.recovery import InjectedFault, PoisonTracker, RecoveryTracker
from doll.drill.status_trackers import ControlTracker, SetTracker
from doll.drill.stream import poison_for
from doll.process.children import children_of
from doll.records.control import AnyRecord, ServerStatus, Update

if TYPE_CHECKING:
    from pathlib import Path

    from doll.config import JobConfig
    from doll.drill.routes import RoleRelays
    from doll.local.stack import Stack
    from doll.local.supervisor import Handle, RoleSpec, Supervisor
    from doll.services import Services

# Kafka starts in 7 s, or in a minute on a machine with 20 processes per core; a longer recovery counts as a failure.
_RECOVERY_TIMEOUT_S: Final = 300.0
_EXIT_TIMEOUT_S: Final = 90.0
_SETTLE_S: Final = 3.0  # the job continues for this long after the last recovery


@dataclass(slots=True)
class _Suspended:
    """A role that is frozen or cut off, and the function that ends this."""

    role: str
    release: Callable[[], None]
    at_s: float
    cut_from: str | None = None


@dataclass(slots=True)
class _LeavingProcess:
    """A process that is not supervised any more and must exit by itself.

    The successor of a zombie is already running. The successor of a preempted process starts when that process exits.
    """

    spec: RoleSpec
    handle: Handle
    by_s: float
    zombie: bool
    notice: InjectedFault | None = None  # the fault, if it leaves because of a notice; the first notice is malformed

    @property
    def role(self) -> str:
        return self.spec.name


class FaultInjector:
    """One drill.

    Args:
        faults: number of faults.
        say: called with one line for each fault.
        relays: the relays that the roles' connections pass through.
        metadata: serves interruption notices to the workers; None: no notices.
        run_folder: folder of the job's checkpoints, unless the job file names another one.
        every_s: seconds from one fault to the next, whether the job has recovered or not; None: as the plan says.
        standby: there are two parameter servers, a leader and a standby; faults are injected into the leader.
        clock: wall clock in seconds, as in `Update.time_s`.
    """

    def __init__(
        self,
        config: JobConfig,
        *,
        faults: int,
        seed: int,
        say: Callable[[str], None],
        relays: RoleRelays,
        run_folder: Path,
        metadata: FakeMetadataService | None = None,
        every_s: float | None = None,
        standby: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.standby = standby
        self._relays = relays
        self._metadata = metadata
        self._run_folder = run_folder
        self._data: DataFaults | None = None
        self._leader_pid = 0
        self._leader_term = 0
        self._config = config
        self._num_stages = 0 if config.worker.pipeline is None else config.worker.pipeline.stages
        self._number = faults
        self._seed = seed
        self._say = say
        self._clock = clock
        self._every_s = every_s
        self._copies = LateCopies(config)
        for worker in range(config.data.workers):
            for relay in relays.to(f"worker-{worker}", "control"):
                relay.watch = partial(self._copies.watch, worker)
        self._plan: tuple[Fault, ...] = ()
        self._next = 0
        self._recoveries = RecoveryTracker()
        self._control = ControlTracker(config.control.kind)
        self._sets = SetTracker()
        self._ready_s: float | None = None  # time since which no fault is open
        self._learning = False
        self._suspended: list[_Suspended] = []
        self._leaving: list[_LeavingProcess] = []

    def feed(self, record: AnyRecord) -> None:
        """A record of the `updates` or `metrics` topic."""

        self._learning = self._learning or isinstance(record, Update)
        if isinstance(record, ServerStatus) and record.term >= self._leader_term:
            self._leader_term, self._leader_pid = record.term, record.pid
            self._control.feed(record)
        if isinstance(record, Update | ServerStatus):
            self._sets.feed(record)
        self._recoveries.feed(record)

    @property
    def advertised_ports(self) -> Sequence[Mapping[str, int]]:
        """As of `RoleRelays`."""
        return self._relays.advertised_ports

    def environment(self, role: str) -> Mapping[str, str]:
        """Environment variables that make a worker poll for its notices here."""
        if self._metadata is None or not role.startswith("worker-"):
            return {}
        return self._metadata.environment(role)

    def services(self, role: str, stack: Stack) -> Services:
        """As of `RoleRelays`."""
        return self._relays.services(role, stack)

    def tick(self, supervisor: Supervisor, stack: Stack) -> str | None:
        """Inject what is due, and return the reason why the job ends now, or None.

        Raises:
            DrillError: no update came within the recovery timeout after a fault, a zombie does not exit, or workers
                do not return to the fastest control channel.
        """
        now = self._clock()
        if not self._plan:
            if not self._learning:
                return None
            self._data = DataFaults(
                self._config, stack, self._run_folder, self._copies, self._recoveries.add_poison_offset
            )
            self._plan = self.plan_for(self._targets(stack), len(stack.kafka.nodes) if stack.kafka is not None else 1)
        assert self._data is not None
        self._data.poll(now)
        self._end_suspensions(now)
        self._check_leaving(supervisor, now)
        if late := [entry for entry in self._recoveries.open if now - entry.waiting_since_s > _RECOVERY_TIMEOUT_S]:
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
        if not (calm and self.is_recovered):
            return None
        return f"drill: {self._number} faults" if self._control_is_back(now) else None

    def plan_for(self, targets: Collection[FaultTarget], brokers: int) -> tuple[Fault, ...]:
        """The faults to inject, in order."""
        without = {"stream_poison"} if poison_for(self._config, 0) is None else set()
        return make_plan(
            self._number,
            self._seed,
            workers=self._config.data.workers,
            targets=targets,
            links=[link for link in self._control.links if link == "local" or link in targets],
            standby=self.standby,
            brokers=brokers,
            stages=self._num_stages,
            without=without | self._impossible(),
        )

    def _impossible(self) -> set[str]:
        """Kinds that this job has no target for."""
        no_grants = bool(self._control.links) and "local" not in self._control.links  # not in Kafka, nor on a socket
        return {
            *({"worker_malformed_notice"} if self._metadata is None else ()),
            *({"worker_late_grants"} if no_grants else ()),
            *(() if self._config.training.policy.filter_threshold > 0 else {"worker_late_settles"}),
        }

    @property
    def poisoned(self) -> list[tuple[int, int]]:
        """Partition and offset of each poison record that an update counts as dead."""
        poisons = [entry.poison for entry in self._recoveries.injected if entry.poison is not None]
        return [(poison.partition, offset) for poison in poisons for offset in sorted(poison.dead)]

    @property
    def is_recovered(self) -> bool:
        """Whether the job has recovered from every fault, and no process is frozen, cut off or leaving."""
        return not (self._recoveries.open or self._suspended or self._leaving)

    def close(self) -> None:
        """Resume what is frozen or cut off, and kill leaving processes. It may be called again."""
        for suspended in self._suspended:
            suspended.release()
        for leaving in self._leaving:
            leaving.handle.kill()
        if self._data is not None:
            self._data.close()
        self._suspended, self._leaving = [], []

    def report_fields(self) -> dict[str, Any]:
        """The drill's fields in `report.json`."""
        return {
            "drill_seed": self._seed,
            "faults_planned": self._number,
            "poisoned": self.poisoned,
            "control": self._control.report(),
            "sets": self._sets.report(),
            **self._recoveries.report(),
        }

    def log(self) -> list[dict[str, Any]]:
        """Every fault with its time and recovery, for a file."""
        return [
            {
                "number": entry.fault.number, "kind": entry.fault.kind.name, "role": entry.fault.role,
                "time_s": entry.time_s, "hold_s": round(entry.fault.hold_s, 3),
                "overlapping": entry.fault.overlapping, "recovery_s": entry.recovery_s,
                **({"cut": entry.fault.cut} if entry.fault.kind.cut_from is not None else {}),
            }
            for entry in self._recoveries.injected
        ]  # fmt: skip

    def _targets(self, stack: Stack) -> set[FaultTarget]:

        targets: set[FaultTarget] = {"worker", "stage", "ps"}
        if self._config.source is not None and not isinstance(self._config.source, StdinSource):
            targets.add("producer")
        if self._config.evaluation.enabled:
            targets.add("evaluator")
        # Only services that this run has started.
        if stack.redis is not None:
            targets.add("redis")
        if stack.kafka is not None:
            targets |= {"kafka", "stream", "broker"}
        return targets

    def _control_is_back(self, now: float) -> bool:
        """Whether each worker uses the fastest control channel again, after all faults.

        Raises:
            DrillError: a worker does not, for as long as a recovery may take.
        """
        assert self._ready_s is not None
        if self._control.updated_s > self._ready_s and not self._control.behind:
            return True
        if now - self._ready_s > _RECOVERY_TIMEOUT_S:
            raise DrillError(
                f"workers {list(self._control.behind)} are down or not back on the control channel "
                f"{self._control.links[0]!r} {now - self._ready_s:.0f} s after the last recovery; expected them within "
                f"{_RECOVERY_TIMEOUT_S:g} s"
            )
        return False

    def _is_due(self, fault: Fault, now: float) -> bool:
        if not self._recoveries.injected:
            return True
        if self._every_s is not None:
            return now - self._recoveries.injected[0].time_s >= len(self._recoveries.injected) * self._every_s
        if fault.overlapping:
            return now - self._recoveries.injected[-1].time_s >= fault.gap_s
        return self._ready_s is not None and now - self._ready_s >= fault.gap_s

    # --- injection

    def _inject(self, fault: Fault, supervisor: Supervisor, stack: Stack, now: float) -> bool:
        """Inject the fault; False if its target is down, frozen or cut off now: the caller tries again later."""
        kind = fault.kind
        role = self._role(fault, supervisor)
        if any(suspended.role == role for suspended in self._suspended) or any(
            leaving.role == role and not leaving.zombie for leaving in self._leaving
        ):
            return False
        if kind.cut_from == "control" and any(suspended.cut_from == "control" for suspended in self._suspended):
            return False  # a cut of the server's links includes the links of each worker
        if (is_injected := self._inject_into_data(fault, now)) is not None:
            return is_injected
        if kind.target in ("redis", "kafka", "broker"):
            nodes = stack.kafka.nodes if stack.kafka is not None else ()
            server = stack.redis if kind.target == "redis" else nodes[fault.broker]
            if server is None or server.pid is None:
                return False
            self._record_injection(fault, role, now)
            if kind.action == "kill":
                server.kill()  # `doll up` restarts it
            else:
                pid = server.pid
                self._freeze(role, fault.hold_s, now, lambda number: os.kill(pid, number))
            return True
        handle = supervisor.handles().get(role)
        if handle is None:
            return False
        if kind.target == "stage":
            return self._disturb_stage(fault, role, handle, supervisor, now)
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
                relays = self._relays.to(role, kind.cut_from)
                for relay in relays:
                    relay.start_cut(fault.cut)

                def restore() -> None:
                    for relay in relays:
                        relay.restore()

                self._suspended.append(_Suspended(role, restore, now + fault.hold_s, kind.cut_from))
        return True

    def _inject_into_data(self, fault: Fault, now: float) -> bool | None:
        assert self._data is not None

        def record(role: str, poison: PoisonTracker | None = None) -> InjectedFault:
            self._record_injection(fault, role, now, poison)
            return self._recoveries.injected[-1]

        return self._data.inject(fault, [suspended.role for suspended in self._suspended], record, now)

    def _disturb_stage(self, fault: Fault, role: str, handle: Handle, supervisor: Supervisor, now: float) -> bool:
        """Its worker goes with it; a stage that runs again before its worker gives it up loses nothing."""
        stages = children_of(handle.pid)
        name = f"stage {fault.stage + 1} of {role}"
        is_frozen = any(suspended.role.endswith(role) for suspended in self._suspended)
        if len(stages) != self._num_stages or is_frozen:
            return False  # it has just started, or is about to end
        pid = stages[fault.stage]
        self._record_injection(fault, name, now)
        supervisor.reset_failures(role)
        match fault.kind.action:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "freeze":
                self._freeze(name, fault.hold_s, now, lambda number: os.kill(pid, number))
            case _:
                os.kill(pid, signal.SIGTERM)
                spec, leaving = supervisor.release(role)
                self._leaving.append(_LeavingProcess(spec, leaving, now + _EXIT_TIMEOUT_S, zombie=False))
        return True

    def _role(self, fault: Fault, supervisor: Supervisor) -> str:
        """Name of the process; of two parameter servers the leader's."""
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
                return  # it was killed while frozen

        self._suspended.append(_Suspended(role, thaw, now + hold_s))

    def _end_suspensions(self, now: float) -> None:
        for suspended in [suspended for suspended in self._suspended if now >= suspended.at_s]:
            self._suspended.remove(suspended)
            suspended.release()

    def _check_leaving(self, supervisor: Supervisor, now: float) -> None:
        for leaving in list(self._leaving):
            if (
                leaving.notice is not None
                and self._metadata is not None
                and self._metadata.num_bad_notices_served(leaving.role)
            ):
                self._metadata.serve_notice(leaving.role)  # a worker that still polls after a malformed notice leaves
            if leaving.handle.poll() is not None:
                self._leaving.remove(leaving)
                if leaving.notice is not None and self._metadata is not None:
                    self._metadata.clear_notice(leaving.role)
                    leaving.notice.is_done = True
                if not leaving.zombie:
                    supervisor.start(leaving.spec)
            elif leaving.zombie and supervisor.exit_codes().get(leaving.role) == 0:
                # It was frozen before it joined, and has joined since: its session is newer, so the successor has left.
                self._leaving.remove(leaving)
                supervisor.adopt(leaving.spec, leaving.handle)
            elif now > leaving.by_s:
                what = "was replaced" if leaving.zombie else "was asked to leave"
                if leaving.notice is not None:
                    what += " by a notice that followed a malformed one"
                raise DrillError(
                    f"{leaving.role} (process {leaving.handle.pid}) {what}: expected its exit within "
                    f"{_EXIT_TIMEOUT_S:g} s, but it still runs"
                )
