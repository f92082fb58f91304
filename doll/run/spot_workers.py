"""The workers of a spot run: a controller launches them as machines on a replayed market, which preempts them.

Order of effects: 1. `doll up` starts the parameter server, the controller launches the workers; 2. when they are ready
the source starts, the market opens and the job's clock runs; 3. the controller plans again every second until the job
has finished, then terminates all workers; 4. the report compares cost and moves with the predicted ones.

Everything that the provisioner sees uses one clock, which stands still until the market opens: what a laptop takes to
start its processes is not part of the market. Times are of this machine; market time runs `fleet.speed_up` times
faster, and is what is billed (see `doll.provisioner.traces.market`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from doll.errors import DollError
from doll.kafka.job_records import JobRecords
from doll.monitor import spot_plot
from doll.monitor.display import Display
from doll.monitor.progress import JobSnapshot
from doll.monitor.spot_history import MarketTimeline, SpotResult, report_section
from doll.provisioner.billing import LOCAL, all_on_demand_usd, bill
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.port import Instance
from doll.provisioner.fleets.processes import ProcessFleet
from doll.provisioner.prices.trace import TracePrices
from doll.provisioner.state_store import FileStateStore
from doll.provisioner.status import instance_text
from doll.provisioner.traces.job_market import MarketProbe
from doll.provisioner.traces.market import MarketClock
from doll.records import AnyRecord, Finished, Metric
from doll.run.folder import RunFolder
from doll.run.hooks import NoHook
from doll.run.spot import SpotRun
from doll.run.spot_clock import PausedClock
from doll.run.spot_leaves import LeaveReporter
from doll.simulation.adaptive import ADAPTIVE

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.local.forks import ForkServer
    from doll.local.stack import Stack
    from doll.local.supervisor import RoleSpec, Supervisor

WORKERS_READY_TIMEOUT_S: Final = 180.0
_PICTURE: Final = "spot.png"


class SpotWorkerPool(NoHook):
    """The workers of one run: a controller on a fleet of processes, and what is shown of it."""

    def __init__(self, config: JobConfig, spot_run: SpotRun, run: RunFolder, display: Display) -> None:
        self._config = config
        self._spot_run = spot_run
        self._run = run
        self._display = display
        self._clock = PausedClock()
        self._opening = MarketClock()
        self._timeline = MarketTimeline()
        self._fleet: ProcessFleet | None = None
        self._controller: Controller | None = None
        self._job_records: JobRecords | None = None
        self._leave_reporter: LeaveReporter | None = None
        self._decision: Decision | None = None
        self._turn_at_s = 0.0
        self._workers_ready = False
        self._waiting_since_s = time.monotonic()
        self._began_s = time.time()
        self._finished_s: float | None = None
        self._finished_version = 0
        self._closed = False
        self._reported_moves = self._reported_preempted = 0
        for line in spot_run.text().splitlines():
            display.say(line)

    # --- RunHook

    def feed(self, record: AnyRecord) -> None:
        if isinstance(record, Metric | Finished) and record.time_s < self._began_s:
            return  # of an earlier run on the same topics
        if isinstance(record, Metric) and record.source == "producer" and not self._clock.runs:
            self._open(record.values.get("delivered_total", 0.0))
        if isinstance(record, Finished) and self._finished_s is None:
            self._finished_s, self._finished_version = self._clock.at(record.time_s), record.version

    def tick(self, supervisor: Supervisor, stack: Stack) -> str | None:
        if self._fleet is None or self._controller is None or self._job_records is None:
            return None
        self._fleet.poll()
        self._read()
        if self._leave_reporter is not None:
            self._leave_reporter.report(self._fleet.machines)
        now_s = time.monotonic()
        if now_s >= self._turn_at_s:
            self._turn_at_s = now_s + self._spot_run.planner.replan_s
            self._decide()
        if not self._workers_ready and now_s - self._waiting_since_s > WORKERS_READY_TIMEOUT_S:
            raise DollError(
                f"the workers are not ready after {WORKERS_READY_TIMEOUT_S:g} s: see {self._run.logs}/worker-*.log"
            )
        return None

    def close(self) -> None:
        """Terminate all machines and make the last bill."""
        if self._closed or self._fleet is None or self._controller is None:
            return
        self._closed = True
        if not self._clock.runs:
            self._clock.start()  # the fleet kills what ignores SIGTERM by this clock
        self._decide(draining=True)
        self._fleet.wait_until_ended(self._config.worker.drain_s + 5.0)
        self._decide(draining=True)  # the last bill
        self._fleet.close()
        if self._job_records is not None:
            self._job_records.__exit__()
        if self._leave_reporter is not None:
            self._leave_reporter.close()

    def report_fields(self) -> dict[str, Any]:
        if self._fleet is None or self._decision is None:
            return {}
        machines, decision = self._fleet.machines, self._decision
        return {
            **report_section(self._result, self._spot_run.predictions, ADAPTIVE, self._timeline, machines),
            "market": self._spot_run.market_facts(),
            "bill": decision.bill.to_dict(),
            "alarms": list(decision.alarms),
        }

    # --- WorkerPool

    def start_workers(self, forks: ForkServer, stack: Stack, spec: Callable[[Instance], RoleSpec]) -> None:
        market = self._spot_run.market
        self._fleet = ProcessFleet(
            forks, spec, self._run.path, market=market, market_clock=self._opening,
            boot_s=self._spot_run.fleet.boot_s, drain_s=self._config.worker.drain_s, clock=self._clock,
        )  # fmt: skip
        self._controller = Controller(
            self._spot_run.settings, self._fleet, TracePrices(market, self._opening),
            FileStateStore(self._run.path, self._config.job),
            probe=MarketProbe(market, lambda: self._opening.since(self._clock())),
        )  # fmt: skip
        self._job_records = JobRecords(self._config, stack.services, {})
        self._job_records.read_history()  # of an earlier run on topics that are still there
        self._leave_reporter = LeaveReporter(self._config, stack.services)
        self._waiting_since_s = time.monotonic()

    @property
    def workers_ready(self) -> bool:
        return self._workers_ready

    def pids(self) -> dict[str, int]:
        if self._fleet is None:
            return {}
        return {
            f"worker-{machine.instance.slot}.{machine.instance.incarnation}": machine.pid
            for machine in self._fleet.machines
            if machine.pid is not None and machine.instance.ended_s is None
        }

    def with_status(self, snapshot: JobSnapshot) -> JobSnapshot:
        if self._fleet is None or self._decision is None:
            return snapshot
        decision, planner = self._decision, self._spot_run.planner
        usd: dict[int, float] = {}
        for line in decision.bill.lines:
            usd[line.slot] = usd.get(line.slot, 0.0) + line.usd
        workers = tuple(
            dataclasses.replace(line, machine=self._machine_text(line.worker), usd=usd.get(line.worker, 0.0))
            for line in snapshot.workers
        )
        alive = decision.alive
        num_spot = sum(instance.market == "spot" for instance in alive)
        elapsed_s = decision.elapsed_s if self._clock.runs else 0.0
        costs = (
            f"{elapsed_s:.0f} of {planner.deadline_s:g} s, {num_spot} spot + {len(alive) - num_spot} on-demand, "
            f"{decision.bill.usd:.3f} USD, {self._preempted()} preemptions, {len(self._timeline.moves)} moves"
        )
        return dataclasses.replace(snapshot, workers=workers, costs=costs)

    def files(self) -> dict[str, Path]:
        if self._fleet is None or self._decision is None:
            return {}
        picture = self._run.path / _PICTURE
        spot_plot.draw(
            picture, timeline=self._timeline, result=self._result, predicted=self._spot_run.predicted,
            market=self._spot_run.market, machines=self._fleet.machines, opened_s=self._opening.opened_s or 0.0,
            updates=self._target_updates, job=self._config.job,
        )  # fmt: skip
        return {"market": picture, "decisions": FileStateStore(self._run.path, self._config.job).journal}

    # --- turns

    def _read(self) -> None:
        """Records of workers and parameter server."""
        assert self._job_records is not None
        assert self._controller is not None
        for timed_record in self._job_records.poll(0.0):
            self._controller.feed(timed_record.record, self._clock.at(timed_record.at_s))
            if self._leave_reporter is not None:
                self._leave_reporter.feed(timed_record.record)

    def _decide(self, *, draining: bool = False) -> None:
        assert self._controller is not None
        decision = self._decision = self._controller.turn(self._clock(), draining=draining)
        if self._clock.runs:
            self._timeline.feed(decision)
            self._report()
        elif not self._workers_ready:
            self._workers_ready = self._all_ready(decision)

    def _all_ready(self, decision: Decision) -> bool:
        """Every slot has a ready worker, or waits for spot as planned."""
        waiting = {
            slot
            for slot, wanted in enumerate(decision.markets)
            if wanted == "spot" and not self._spot_run.market.is_up(slot, 0.0)
        }
        return decision.phase == "run" and _ready_slots(decision) | waiting == set(range(self._config.data.workers))

    def _open(self, delivered: float) -> None:
        """Open the market, as of the first of the samples that the source has delivered."""
        if delivered <= 0 or self._fleet is None or self._decision is None:
            return
        rates = self._spot_run.settings.rates_per_s
        ready_rate = sum(float(rates[slot]) for slot in _ready_slots(self._decision))
        sent_s = delivered / max(ready_rate, float(rates.min()))
        self._opening.open(self._clock())
        self._clock.start(ago_s=sent_s)
        self._display.say("the market has opened: from now on machines are billed and may be preempted")

    def _report(self) -> None:
        """Show moves and preemptions since the last turn."""
        for move in self._timeline.moves[self._reported_moves :]:
            self._display.say(move.text())
        self._reported_moves = len(self._timeline.moves)
        assert self._fleet is not None
        preempted = self._preempted()
        if preempted > self._reported_preempted:
            self._display.say(f"{preempted} preemptions so far")
            self._reported_preempted = preempted

    def _preempted(self) -> int:
        return 0 if self._fleet is None else sum(machine.preempted for machine in self._fleet.machines)

    def _machine_text(self, slot: int) -> str:
        """The machines of a slot in words, and whether spot is available to it."""
        assert self._fleet is not None
        assert self._decision is not None
        now_s, ready = self._clock(), self._decision.ready
        texts = [
            instance_text(
                instance.market, instance.incarnation, instance.state, is_ready=instance.id in ready,
                has_notice=instance.notice_s is not None, age_s=now_s - instance.launched_s,
            )
            for instance in (machine.instance for machine in self._fleet.machines)
            if instance.slot == slot and instance.ended_s is None
        ]  # fmt: skip
        available = self._spot_run.market.is_up(slot, self._opening.since(now_s))
        return f"{' + '.join(texts) or 'none'}{'' if available else ' (no spot available)'}"

    @property
    def _target_updates(self) -> int:
        """J."""
        planner = self._spot_run.planner
        return round(planner.samples / (self._config.group_size * planner.batch_size))

    @property
    def _result(self) -> SpotResult:
        assert self._decision is not None
        planner, market = self._spot_run.planner, self._spot_run.market
        end_s = self._finished_s if self._finished_s is not None else self._clock()
        return SpotResult(
            finish_s=end_s - (self._opening.opened_s or end_s),
            reached=self._finished_version >= self._target_updates,
            deadline_s=planner.deadline_s,
            cost_usd=self._usd_until(end_s),
            cost_until_terminated_usd=self._decision.bill.usd,
            all_on_demand_usd=all_on_demand_usd(
                planner.samples, self._spot_run.settings.rates_per_s, market.on_demand_usd_per_h
            ),
        )

    def _usd_until(self, end_s: float) -> float:
        """What all machines cost until the job had ended, as predictions and Eq. (16) count."""
        assert self._fleet is not None
        instances = [machine.instance for machine in self._fleet.machines if machine.instance.launched_s < end_s]
        ended = [dataclasses.replace(instance, ended_s=min(instance.ended_s or end_s, end_s)) for instance in instances]
        return bill(ended, TracePrices(self._spot_run.market, self._opening).series, LOCAL, end_s).usd


def _ready_slots(decision: Decision) -> set[int]:
    return {instance.slot for instance in decision.alive if instance.id in decision.ready}
