"""Runs the workers of `doll up` as actors of Ray, with a provisioner; starts a Ray head if none is given."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Final

from doll.config import RayFleetConfig
from doll.errors import ConfigError
from doll.local import ray_head
from doll.local.ray_head import RayHead
from doll.local.stack import Stack
from doll.local.supervisor import Supervisor
from doll.monitor.state.progress import ProgressModel
from doll.provisioner.state_store import clear_stops, state_of
from doll.provisioner.status import last_decision
from doll.records.control import AnyRecord, Finished
from doll.run.folder import display_path
from doll.run.local.context import PROVISIONER, LocalRun, RunHook
from doll.run.local.provisioning import HEAD_LABELS, ActorCluster

_RAY: Final = "ray"
_READY_S: Final = 180.0  # an actor starts in 10 s, and imports torch
_END_S: Final = 60.0  # in addition to the time that workers need to drain
_POLL_S: Final = 0.1
_REPORTED: Final = (
    "phase", "spent_usd", "spent_spot_usd", "spent_on_demand_usd", "all_on_demand_usd", "expected_cost_usd",
    "moves_total", "interruptions_total", "incarnations", "alarms",
)  # fmt: skip


class ActorWorkers(RunHook):
    """A hook that leaves the workers to the provisioner. A Ray head that this run has started ends with the run. A
    cluster that existed before continues."""

    def __init__(self) -> None:
        self._run: LocalRun | None = None
        self._supervisor: Supervisor | None = None
        self._head: RayHead | None = None
        self._cluster: ActorCluster | None = None
        self._began_s = time.time()
        self._finished = False

    def start_workers(self, run: LocalRun, supervisor: Supervisor) -> None:
        fleet, say = run.config.fleet, run.display.say
        assert isinstance(fleet, RayFleetConfig)
        self._run, self._supervisor = run, supervisor
        address = ray_head.running_address() if fleet.address == "auto" else fleet.address
        if address is not None:
            say(f"Ray: {address}, {'of this machine' if fleet.address == 'auto' else 'from the job file'}")
        else:
            say("Ray: starting a head on this machine (about 10 s)")
            # Each worker needs room for a replacement next to it.
            num_cpus = math.ceil(2 * run.config.data.places * fleet.num_cpus)
            self._head = RayHead(run.folder.path / "services" / _RAY, num_cpus=num_cpus, labels=HEAD_LABELS)
            self._head.start()
            address = self._head.address
            logs = display_path(run.folder.path / "services" / _RAY / "session_latest" / "logs")
            say(f"Ray: {address}, started on this machine; logs of the workers: {logs}")
        self._cluster = ActorCluster(address, self._head is not None, run.after_term)
        clear_stops(run.config, run.folder.path)  # a person starts or resumes this run
        supervisor.start(run.provisioner(address, is_own=self._cluster.is_own))

    def environment(self, role: str) -> Mapping[str, str]:
        return ray_head.CLIENT_ENV if role == PROVISIONER and self._head is not None else {}

    def workers_ready(self, model: ProgressModel, waited_s: float) -> bool:
        return waited_s > _READY_S or all(line.is_live or line.is_spare for line in model.worker_lines())

    def pids(self) -> dict[str, int]:
        pid = self._head.pid if self._head is not None else None
        return {} if pid is None else {_RAY: pid}

    def feed(self, record: AnyRecord) -> None:
        if isinstance(record, Finished) and record.time_s >= self._began_s:
            self._finished = True

    def tick(self, supervisor: Supervisor, stack: Stack) -> str | None:
        if self._head is not None and self._head.pid is None and self._run is not None:
            self._run.display.say("Ray died: restarting it")
            self._head.start()
            if (provisioner := supervisor.handles().get(PROVISIONER)) is not None:
                provisioner.kill()  # it was connected to the head that died
        return None

    def close(self) -> None:
        run, supervisor, self._supervisor = self._run, self._supervisor, None
        if run is None or supervisor is None:
            return
        if (provisioner := supervisor.handles().get(PROVISIONER)) is not None:
            run.display.say("ending the actors")
            deadline_s = time.monotonic() + run.config.worker.drain_s + _END_S
            if not self._finished:  # after the end of the job, it ends the actors itself
                provisioner.terminate()
            while provisioner.poll() is None and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
            if provisioner.poll() is None:
                provisioner.kill()
        if self._head is not None:
            self._head.stop()
        elif provisioner is None or provisioner.poll() != 0:
            run.display.say(
                f"warning: actors may have been left on Ray: doll provision drain {display_path(run.folder.path)}"
            )

    def report_fields(self) -> dict[str, Any]:
        run, cluster = self._run, self._cluster
        if run is None or cluster is None:
            return {}
        fields: dict[str, Any] = {"kind": _RAY, "address": cluster.address, "is_own": cluster.is_own}
        try:
            decision = last_decision(state_of(run.config, run.folder.path), "doll up")
        except ConfigError:  # the provisioner ended before its first decision
            return {"fleet": fields}
        return {"fleet": fields | {name: decision[name] for name in _REPORTED if name in decision}}
