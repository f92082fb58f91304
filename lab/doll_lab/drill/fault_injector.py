"""Injects the faults of a plan into a running `doll up`, in order, and ends the job after the recovery from all faults.

It is called a few times per second and never blocks. It continues every process that it stopped (SIGSTOP). A stopped
process that was replaced in the meantime (a zombie) must exit by itself after SIGCONT; if it does not, the drill fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from doll.config import StdinSource
from doll.process.files import write_json
from doll.records.control import AnyRecord, ServerStatus, Update
from doll.run.local.context import RunHook

from doll_lab.drill.actions import DrillError, Scene
from doll_lab.drill.plan import Fault, FaultTarget, make_plan
from doll_lab.drill.recovery import RecoveryTracker
from doll_lab.drill.status_trackers import ControlTracker, SetTracker
from doll_lab.drill.stream import SamplesTopic, poison_for

if TYPE_CHECKING:
    from pathlib import Path

    from doll.config import JobConfig
    from doll.local.stack import Stack
    from doll.local.supervisor import Supervisor
    from doll.services import Services

    from doll_lab.drill.routes import RoleRelays

# Kafka starts in 7 s, or in a minute on a machine with 20 processes per core; a longer recovery counts as a failure.
_RECOVERY_TIMEOUT_S: Final = 300.0
_SETTLE_S: Final = 3.0  # time that the job continues after the last recovery


class FaultInjector(RunHook):
    """The faults of one drill.

    Args:
        faults: number of faults.
        say: function that is called with one line for each fault.
        relays: relays for the connections of the roles.
        run_folder: folder of the job's checkpoints, unless the job file names another one.
        every_s: seconds from one fault to the next, also without a recovery; None: the plan determines the time.
        standby: whether there are two parameter servers, a leader and a standby; faults are injected into the leader.
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
        every_s: float | None = None,
        standby: bool = False,
        only: FaultTarget | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.standby = standby
        self._relays = relays
        self._run_folder = run_folder
        self._leader_pid = 0
        self._leader_term = 0
        self._config = config
        self._number = faults
        self._seed = seed
        self._say = say
        self._clock = clock
        self._every_s = every_s
        self._only = only
        self._plan: tuple[Fault, ...] = ()
        self._next = 0
        self._recoveries = RecoveryTracker()
        self._control = ControlTracker(config.control.kind)
        self._sets = SetTracker()
        self._ready_s: float | None = None  # time since which all faults are over
        self._learning = False
        self._scene: Scene | None = None  # from the first update on

    def feed(self, record: AnyRecord) -> None:
        """Process a record of the `updates` or `metrics` topic."""
        self._learning = self._learning or isinstance(record, Update)
        if isinstance(record, ServerStatus) and record.term >= self._leader_term:
            self._leader_term, self._leader_pid = record.term, record.pid
            self._control.feed(record)
        if isinstance(record, Update | ServerStatus):
            self._sets.feed(record)
        self._recoveries.feed(record)

    @property
    def advertised_ports(self) -> Sequence[Mapping[str, int]]:
        """Return the ports of the relays; see `RoleRelays`."""
        return self._relays.advertised_ports

    def services(self, role: str, stack: Stack) -> Services:
        """Return the addresses of the relays; see `RoleRelays`."""
        return self._relays.services(role, stack)

    def tick(self, supervisor: Supervisor, stack: Stack) -> str | None:
        """Inject faults that are due. Return the reason why the job ends now, or None.

        Raises:
            DrillError: no update came within the recovery timeout after a fault, a zombie does not exit, or workers do
                not return to the fastest control channel.
        """
        now = self._clock()
        if self._scene is None:
            if not self._learning:
                return None
            self._scene = self._open_scene(supervisor, stack)
            self._plan = self.plan_for(self._targets(stack), len(stack.kafka.nodes) if stack.kafka is not None else 1)
        self._scene.leader_pid = self._leader_pid if self.standby else None
        self._scene.poll(now)
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
            if self._is_due(fault, now) and self._scene.inject(fault):
                self._next += 1
            return None
        calm = self._ready_s is not None and now - self._ready_s > _SETTLE_S
        if not (calm and self.is_recovered):
            return None
        return f"drill: {self._number} faults" if self._control_is_back(now) else None

    def _open_scene(self, supervisor: Supervisor, stack: Stack) -> Scene:
        return Scene(
            config=self._config,
            supervisor=supervisor,
            stack=stack,
            relays=self._relays,
            topic=SamplesTopic(self._config, stack.services, self._run_folder),
            recoveries=self._recoveries,
            say=self._announce,
        )

    def plan_for(self, targets: Collection[FaultTarget], brokers: int) -> tuple[Fault, ...]:
        """Return the faults to inject, in order.

        Raises:
            DrillError: this job does not run the target of the faults.
        """
        if self._only is not None and self._only not in targets:
            raise DrillError(f"expected faults of what this job runs, {sorted(targets)}, got {self._only!r}")
        pipeline, links = self._config.worker.pipeline, self._control.links
        is_backlog = self._config.arrivals.process == "asap"  # new records are not read before the job ends
        impossible = {
            "stream_poison": is_backlog or poison_for(self._config, 0) is None,
        }
        return make_plan(
            self._number,
            self._seed,
            workers=self._config.data.workers,
            targets=targets,
            links=[link for link in links if link == "local" or link in targets],
            standby=self.standby,
            brokers=brokers,
            stages=0 if pipeline is None else pipeline.stages,
            shards=self._config.ps.num_shards if self._config.ps.num_shards > 1 else 0,
            without={name for name, is_impossible in impossible.items() if is_impossible},
            only=self._only,
        )

    @property
    def poisoned(self) -> list[tuple[int, int]]:
        """Return partition and offset of each poison record that an update counts as dead."""
        poisons = [entry.poison for entry in self._recoveries.injected if entry.poison is not None]
        return [(poison.partition, offset) for poison in poisons for offset in sorted(poison.dead)]

    @property
    def is_recovered(self) -> bool:
        """Whether the job has recovered from every fault, and no process is frozen, cut off or leaving."""
        return not self._recoveries.open and (self._scene is None or not self._scene.effects)

    def end_effects(self) -> None:
        """Continue the effects of faults, without another fault."""
        if self._scene is not None:
            self._scene.poll(self._clock())

    def close(self) -> None:
        """Resume frozen or cut off processes, and kill leaving processes. May be called again."""
        if self._scene is not None:
            self._scene.close()

    def report_fields(self) -> dict[str, Any]:
        """Return the drill's fields in `report.json`; all faults are written to `faults.json`."""
        write_json(self._run_folder / "faults.json", self._log())
        return {
            "drill_seed": self._seed,
            "faults_planned": self._number,
            "poisoned": self.poisoned,
            "control": self._control.report(),
            "sets": self._sets.report(),
            **self._recoveries.report(),
        }

    def _log(self) -> list[dict[str, Any]]:
        """Every fault with its time and recovery."""
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
        targets: set[FaultTarget] = {"worker", "ps"}
        if self._config.worker.pipeline is not None:
            targets.add("stage")
        if self._config.ps.num_shards > 1:
            targets.add("shard")
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
        """Return whether, after all faults, each worker uses the fastest control channel again.

        Raises:
            DrillError: a worker does not use it within the recovery timeout.
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

    def _announce(self, fault: Fault, target: str) -> None:
        """Report the effect of a fault that is injected now."""
        self._ready_s = None
        what = f"{fault.kind.action} {target}"
        if fault.kind.cut_from is not None:
            what = f"cut {target} from {fault.kind.cut_from} ({fault.cut}, {fault.hold_s:.1f} s)"
        self._say(f"fault {fault.number} of {len(self._plan)}: {what}")
