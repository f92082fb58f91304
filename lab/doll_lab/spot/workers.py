"""The worker pool of a spot run: `doll up` with workers on machines that a market preempts.

Order of events: 1. `doll up` starts the parameter server, the controller launches the workers; 2. when they are ready,
the source starts, the market opens and the run's clock starts; 3. the controller plans again every second until the job
has finished, then terminates all workers; 4. the report compares costs and moves with the predictions.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, Final

from doll import amounts
from doll.config import JobConfig
from doll.errors import DollError
from doll.local.stack import Stack
from doll.local.supervisor import Supervisor
from doll.monitor.state.progress import JobSnapshot, ProgressModel
from doll.monitor.views.display import Display
from doll.process.metric_names import DELIVERED_TOTAL, PRODUCER
from doll.provisioner.billing import all_on_demand_usd
from doll.provisioner.state_store import FileStateStore
from doll.ps.engine.stopping import is_target
from doll.records.control import AnyRecord, Finished, Metric
from doll.run.folder import RunFolder
from doll.run.local.context import LocalRun, RunHook

from doll_lab.backtests.adaptive import ADAPTIVE
from doll_lab.spot.machines import SpotMachines
from doll_lab.spot.preparation import SpotRun
from doll_lab.spot.spot_history import SpotResult, report_section

WORKERS_READY_TIMEOUT_S: Final = 180.0
_MAX_GAPS: Final = 100  # maximum number of gaps of each slot in the report


class SpotWorkerPool(RunHook):
    """The workers of one spot run, and the information that is shown and reported about them."""

    def __init__(self, config: JobConfig, spot_run: SpotRun, run: RunFolder, display: Display) -> None:
        self._config = config
        self._spot_run = spot_run
        self._run = run
        self._display = display
        self._machines: SpotMachines | None = None
        self._turn_at_s = 0.0
        self._workers_ready = False
        self._waiting_since_s = time.monotonic()
        self._began_s = time.time()
        self._finished_s: float | None = None
        self._is_done = False
        self._closed = False
        self._reported_moves = self._reported_preemptions = 0
        for line in spot_run.text().splitlines():
            display.say(line)

    def feed(self, record: AnyRecord) -> None:
        machines = self._machines
        if machines is None or not isinstance(record, Metric | Finished) or record.time_s < self._began_s:
            return  # the record is of another type, or of an earlier run on the same topics
        if isinstance(record, Finished):
            if self._finished_s is None:
                self._finished_s = machines.clock.at(record.time_s)
                self._is_done = record.version >= self._target_updates or is_target(record.reason)
        elif record.source == PRODUCER and not machines.clock.runs:
            self._open_market(machines, record.values.get(DELIVERED_TOTAL, 0.0))

    def tick(self, supervisor: Supervisor, stack: Stack) -> str | None:
        if self._machines is None:
            return None
        self._machines.poll()
        now_s = time.monotonic()
        if now_s >= self._turn_at_s:
            self._turn_at_s = now_s + self._spot_run.planner.replan_s
            self._turn(self._machines)
        if not self._workers_ready and now_s - self._waiting_since_s > WORKERS_READY_TIMEOUT_S:
            raise DollError(
                f"the workers are not ready after {WORKERS_READY_TIMEOUT_S:g} s: see {self._run.logs}/worker-*.log"
            )
        return None

    def close(self) -> None:
        """Terminate all machines."""
        if not self._closed and self._machines is not None:
            self._closed = True
            self._machines.close()
            self._show_changes(self._machines)

    def report_fields(self) -> dict[str, Any]:
        machines = self._machines
        if machines is None or machines.decision is None:
            return {}
        result, predictions = self._result(machines), self._spot_run.predictions
        return {
            **report_section(result, predictions, ADAPTIVE, machines.timeline, machines.machines),
            "market": self._spot_run.market_facts(),
            "spot_unavailable_s": [
                self._spot_run.market.gaps(slot, result.finish_s)[:_MAX_GAPS]
                for slot in range(self._spot_run.market.num_slots)
            ],
            "bill": machines.decision.bill.to_dict(),
            "alarms": list(machines.decision.alarms),
        }

    def start_workers(self, run: LocalRun, supervisor: Supervisor) -> None:
        self._machines = SpotMachines(run, self._spot_run)
        self._waiting_since_s = time.monotonic()

    def workers_ready(self, model: ProgressModel, waited_s: float) -> bool:
        return self._workers_ready

    def pids(self) -> dict[str, int]:
        return {} if self._machines is None else self._machines.pids()

    def with_status(self, snapshot: JobSnapshot) -> JobSnapshot:
        machines = self._machines
        if machines is None or machines.decision is None:
            return snapshot
        decision = machines.decision
        usd: dict[int, float] = {}
        for line in decision.bill.lines:
            usd[line.slot] = usd.get(line.slot, 0.0) + line.usd
        workers = tuple(
            dataclasses.replace(worker, machine=machines.text(worker.worker), usd=usd.get(worker.worker, 0.0))
            for worker in snapshot.workers
        )
        num_spot = sum(instance.market == "spot" for instance in decision.alive)
        elapsed_s = decision.elapsed_s if machines.clock.runs else 0.0
        count = decision.machines_per_worker
        costs = (
            f"{elapsed_s:.0f} of {self._spot_run.planner.deadline_s:g} s, {num_spot} spot + "
            f"{len(decision.alive) - num_spot} on-demand{f' x {count} machines' if count > 1 else ''}, "
            f"{amounts.usd(decision.bill.usd)} USD, {machines.preemptions} "
            f"preemptions, {len(machines.timeline.moves)} moves"
        )
        return dataclasses.replace(snapshot, workers=workers, costs=costs)

    def files(self) -> dict[str, Path]:
        machines = self._machines
        if machines is None or machines.decision is None:
            return {}
        return {"decisions": FileStateStore(self._run.path, self._config.job).journal}

    # --- turns and result

    def _open_market(self, machines: SpotMachines, delivered: float) -> None:
        if delivered > 0 and machines.decision is not None:
            machines.open_market(delivered)
            self._display.say("the market has opened: from now on machines are billed and may be preempted")

    def _turn(self, machines: SpotMachines) -> None:
        machines.turn()
        if machines.clock.runs:
            self._show_changes(machines)
        else:
            self._workers_ready = self._workers_ready or machines.all_ready

    def _show_changes(self, machines: SpotMachines) -> None:
        """Show moves and preemptions since the last call."""
        moves = machines.timeline.moves
        for move in moves[self._reported_moves :]:
            self._display.say(move.text())
        self._reported_moves = len(moves)
        if machines.preemptions > self._reported_preemptions:
            self._reported_preemptions = machines.preemptions
            self._display.say(f"{machines.preemptions} preemptions so far")

    @property
    def _target_updates(self) -> int:
        """Return J, the number of updates of the work."""
        planner = self._spot_run.planner
        return round(planner.samples / (self._config.group_size * planner.batch_size))

    def _result(self, machines: SpotMachines) -> SpotResult:
        assert machines.decision is not None
        planner, market = self._spot_run.planner, self._spot_run.market
        end_s = self._finished_s if self._finished_s is not None else machines.clock()
        return SpotResult(
            finish_s=end_s - (machines.opened_s or end_s),
            reached=self._is_done,
            deadline_s=planner.deadline_s,
            cost_usd=machines.usd_until(end_s),
            cost_until_terminated_usd=machines.decision.bill.usd,
            all_on_demand_usd=all_on_demand_usd(
                planner.samples,
                self._spot_run.settings.rates_per_s,
                market.on_demand_usd_per_h * market.machines_per_slot,
            ),
        )
