"""`doll spot`: `doll up` on a spot market: workers as machines that a controller buys, and that their owner takes back.

Order of effects: 1. the plan, or exit 3; 2. what a backtest of this very market predicts; 3. `doll up`, whose workers
belong to the controller; 4. when they are up the source starts, the market opens and the job's clock runs; 5. the
controller plans anew every second until the job ends, then hands everything back; 6. the figures, beside the predicted.

One clock for all that the provisioner sees: it stands still until the market opens, since what a laptop takes to start
its processes is no part of the market. Times are of this machine; the market runs `fleet.speed_up` times as fast, and
so does its meter (see `doll.provisioner.traces.market`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from doll.cli.options import (
    AlphaOption,
    CycleOption,
    DeadlineOption,
    FreshOption,
    JobArgument,
    JobOption,
    JsonOption,
    PoolOption,
    RunsFolderOption,
    SeedOption,
    SetOption,
    TraceOption,
    target,
)
from doll.cli.output import emit
from doll.errors import ConfigError, DollError
from doll.run.folder import RunFolder

if TYPE_CHECKING:
    from doll.config import JobConfig, PlanConfig, ProcessesFleetConfig
    from doll.kafka.job_records import JobRecords
    from doll.local.forks import ForkServer
    from doll.local.stack import Stack
    from doll.local.supervisor import RoleSpec, Supervisor
    from doll.monitor.display import Display
    from doll.monitor.progress import JobSnapshot
    from doll.provisioner.controller import Controller, ControllerSettings, Decision
    from doll.provisioner.fleets.port import Instance
    from doll.provisioner.fleets.processes import Machine, ProcessFleet
    from doll.provisioner.planning.assessment import Assessment
    from doll.provisioner.planning.state import PlannerSettings
    from doll.provisioner.traces.market import SpotMarket
    from doll.records import AnyRecord
    from doll.services import Services
    from doll.simulation.spot_prediction import Prediction

WORKERS_READY_TIMEOUT_S = 180.0
_PICTURE = "spot.png"
_UNBOUNDED = 1_000_000


def spot(
    job: JobArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    trace: TraceOption = None,
    pool: PoolOption = None,
    alpha: AlphaOption = None,
    cycle: CycleOption = None,
    speed_up: Annotated[
        float | None, typer.Option(help="Market seconds per second of this machine.", show_default=False)
    ] = None,
    deadline: DeadlineOption = None,
    seed: SeedOption = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and predict; start nothing.")] = False,
    runs_folder: RunsFolderOption = Path("runs"),
    fresh: FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a whole job on this machine whose workers live on a spot market: taken back with a notice, or without one.

    Prices and preemptions replay a recording, or a chain of up and down times, at a chosen speed. A controller keeps
    the deadline at the least cost. In the end: cost, beside the predicted one and that of all on-demand; moves with
    their reasons; preemptions; accuracy; the audit. Exit 3 if the plan says that the deadline cannot be met.

    --deadline is in time of this machine, --cycle in that of the market.

    Example: doll spot spot --seed 3
    """
    given = {
        "fleet.trace": trace.resolve() if trace is not None else None, "fleet.pool": pool, "plan.alpha": alpha,
        "plan.cycle_s": cycle, "fleet.speed_up": speed_up, "plan.deadline_s": deadline,
    }  # fmt: skip
    changes = [f"{key}={value}" for key, value in given.items() if value is not None]
    config = target(job, job_option, [*(overrides or []), *changes]).config
    raise typer.Exit(run_spot(config, runs_folder, seed=seed, dry_run=dry_run, as_json=as_json, fresh=fresh))


def run_spot(
    config: JobConfig, runs_folder: Path, *, seed: int, dry_run: bool = False, as_json: bool = False,
    fresh: bool = False,
) -> int:  # fmt: skip
    """Run the job on its market; the exit code as of `run_up`, or 3 for a deadline that cannot be met.

    Raises:
        ConfigError: the job cannot be run this way.
        ServiceUnavailableError: Kafka or Redis cannot be found or started.
    """
    from doll.monitor.run_report import summary
    from doll.run.job import run_up

    spot_run = SpotRun.of(config, seed)
    if spot_run.assessment.problem is not None or dry_run:
        emit(as_json, spot_run.to_dict(), spot_run.text())
        return spot_run.assessment.problem.exit_code if spot_run.assessment.problem is not None else 0
    report = run_up(
        config,
        runs_folder,
        fresh=fresh,
        worker_pool=lambda run, display: SpotWorkerPool(config, spot_run, run, display),
    )
    emit(as_json, report, summary(report))
    return int(report["exit_code"])


@dataclasses.dataclass(frozen=True)
class SpotRun:
    """A job, its market, and what is known of both before anything runs.

    Attributes:
        predictions: by policy; empty where the plan is not feasible.
    """

    market: SpotMarket
    fleet: ProcessesFleetConfig
    settings: ControllerSettings
    seed: int
    assessment: Assessment
    notes: list[str]
    predictions: dict[str, Prediction]

    @classmethod
    def of(cls, config: JobConfig, seed: int) -> SpotRun:
        """Build the market, plan, and predict.

        Raises:
            ConfigError: the job file lacks something, or has what does not go together.
        """
        import numpy as np

        from doll.cli.plan import ask
        from doll.cli.provision import controller_settings
        from doll.config import ProcessesFleetConfig
        from doll.provisioner.planning.assessment import assess
        from doll.simulation.adaptive import ADAPTIVE
        from doll.simulation.spot_prediction import baselines, predict

        fleet, plan = config.fleet, config.plan
        if not isinstance(fleet, ProcessesFleetConfig):
            raise ConfigError(f"fleet.kind: expected processes, the machines of `doll spot`, got {fleet.kind}")
        if plan.deadline_s is None or config.stop.updates is None:
            raise ConfigError("expected plan.deadline_s, and stop.updates: the work that is to be done by then")
        if config.source is None:
            raise ConfigError("source: expected one in the job file: the market opens when it starts")
        market, section = make_market(config, fleet, seed)
        settings, _ = controller_settings(config.model_copy(update={"plan": section}))
        # On this market a launch is tried in every turn and says at once whether there is a machine. Were tries bounded
        # by the minute, those of slots that wait for spot would use up what others need to go on-demand in time.
        limits = dataclasses.replace(
            settings.limits, retry_s=settings.planner.replan_s, early_s=0.0, launches_per_min=_UNBOUNDED,
            fallbacks_per_min=_UNBOUNDED,
        )  # fmt: skip
        settings = dataclasses.replace(settings, limits=limits)
        planner, rates = settings.planner, config.rates_per_s()
        request, notes = ask(config, section, rates, None, None)
        if config.arrivals.while_down != "pause":
            notes.append(
                "arrivals.while_down is queue: what waits for a worker is read when it is back, so that the job ends "
                "earlier and costs less than predicted"
            )
        assessment = assess(request)
        predictions = {}
        if assessment.problem is None:
            leave_s = config.worker.drain_s
            found = [
                predict(market, planner, np.asarray(rates), leave_s=leave_s, policy=one) for one in (None, *baselines())
            ]
            predictions = {one.policy: one for one in found}
            assert ADAPTIVE in predictions
        return cls(market, fleet, settings, seed, assessment, notes, predictions)

    @property
    def planner(self) -> PlannerSettings:
        """In seconds of this machine and USD per hour of it."""
        return self.settings.planner

    @property
    def predicted(self) -> Prediction:
        """For the planner, which is what runs."""
        from doll.simulation.adaptive import ADAPTIVE

        return self.predictions[ADAPTIVE]

    def text(self) -> str:
        """For people."""
        from doll.cli.plan import text

        lines = [text(self.assessment, self.notes)]
        if self.predictions:
            one = self.predicted
            lines.append(
                f"Backtest of this market (seed {self.seed}): {one.cost_usd:.4f} USD, "
                f"{one.cost_usd / self.assessment.all_on_demand_usd:.1%} of on-demand, done at {one.finish_s:.1f} s, "
                f"{one.moves} moves"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **self.assessment.to_dict(),
            "notes": self.notes,
            "market": self.facts(),
            "predictions": {name: dataclasses.asdict(one) for name, one in self.predictions.items()},
        }

    def facts(self) -> dict[str, Any]:
        """The market in a few figures."""
        market = self.market
        return {
            "name": market.name, "seed": self.seed, "alpha": market.alpha, "speed_up": market.speed_up,
            "notice_s": market.notice_s, "no_notice_share": self.fleet.no_notice_share, "boot_s": self.planner.boot_s,
        }  # fmt: skip


def make_market(config: JobConfig, fleet: ProcessesFleetConfig, seed: int) -> tuple[SpotMarket, PlanConfig]:
    """The market of the job file, and its plan with the market's own availability and prices.

    Raises:
        ConfigError: the trace or the pool is not there, or prices are missing.
    """
    from doll.provisioner.traces.market import SpotMarket
    from doll.theory.cost import Prices

    plan, slots = config.plan, config.data.workers
    if fleet.trace is None:
        if plan.spot_usd_per_h is None or plan.on_demand_usd_per_h is None:
            raise ConfigError("expected plan.spot_usd_per_h and plan.on_demand_usd_per_h, or a trace")
        market = SpotMarket.chain(
            slots, Prices(plan.spot_usd_per_h, plan.on_demand_usd_per_h), alpha=plan.alpha, cycle_s=plan.cycle_s,
            speed_up=fleet.speed_up, notice_s=fleet.notice_s, no_notice_share=fleet.no_notice_share, seed=seed,
        )  # fmt: skip
        return market, plan
    from doll.provisioner.traces.recordings import pool_of

    chosen = pool_of(config.path(fleet.trace), fleet.pool, "fleet.pool")
    market = SpotMarket.replay(
        chosen, slots, length_s=plan.deadline_s or 0.0, speed_up=fleet.speed_up, notice_s=fleet.notice_s,
        no_notice_share=fleet.no_notice_share, seed=seed,
    )  # fmt: skip
    section = plan.model_copy(
        update={
            "alpha": chosen.alpha, "cycle_s": chosen.cycle_s,
            "spot_usd_per_h": chosen.price.mean(chosen.start_s, chosen.end_s),
            "on_demand_usd_per_h": chosen.on_demand_usd_per_hour,
        }
    )  # fmt: skip
    return market, section


class PausedClock:
    """Unix seconds that stand still until `start`, then go on at the pace of the real ones."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._begin_s = clock()
        self._started_s: float | None = None

    def start(self, ago_s: float = 0.0) -> None:
        """Go on from now, or as if it had gone on for so long; only the first time counts."""
        if self._started_s is None:
            self._started_s = self._clock() - ago_s

    @property
    def runs(self) -> bool:
        return self._started_s is not None

    def __call__(self) -> float:
        return self.at(self._clock())

    def at(self, real_s: float) -> float:
        """What it shows at a time of the real clock."""
        return self._begin_s if self._started_s is None else self._begin_s + max(0.0, real_s - self._started_s)


class _MarketProbe:
    """The controller's `Probe`."""

    def __init__(self, market: SpotMarket, since: Callable[[], float]) -> None:
        self._market = market
        self._since = since

    def spot_available(self, slot: int) -> bool | None:
        return self._market.is_up(slot, self._since())


class SpotWorkerPool:
    """The workers of one run: a controller on a fleet of processes, and all that is to be told of it."""

    standby = False

    def __init__(self, config: JobConfig, spot_run: SpotRun, run: RunFolder, display: Display) -> None:
        from doll.monitor.spot_history import MarketTimeline
        from doll.provisioner.traces.market import MarketClock

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
        self._leave_reporter: _LeaveReporter | None = None
        self._decision: Decision | None = None
        self._turn_at_s = 0.0
        self._workers_ready = False
        self._waiting_since_s = time.monotonic()
        self._began_s = time.time()
        self._finished_s: float | None = None
        self._finished_version = 0
        self._closed = False
        self._told_moves = self._told_preempted = 0
        for line in spot_run.text().splitlines():
            display.say(line)

    # --- RunHook

    @property
    def advertised_ports(self) -> tuple[dict[str, int], ...]:
        return ({},)

    def services(self, role: str, stack: Stack) -> Services:
        return stack.services

    def environment(self, role: str) -> Mapping[str, str]:
        return {}

    def feed(self, record: AnyRecord) -> None:
        from doll.records import Finished, Metric

        if isinstance(record, Metric | Finished) and record.time_s < self._began_s:
            return  # of an earlier run: its topics may outlive it on a broker that is not ours
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
                f"the workers are not up after {WORKERS_READY_TIMEOUT_S:g} s: see {self._run.logs}/worker-*.log"
            )
        return None

    def close(self) -> None:
        """Everything is handed back."""
        if self._closed or self._fleet is None or self._controller is None:
            return
        self._closed = True
        if not self._clock.runs:
            self._clock.start()  # or who does not heed SIGTERM would never be killed
        self._decide(draining=True)
        self._fleet.wait_until_ended(self._config.worker.drain_s + 5.0)
        self._decide(draining=True)  # the last bill
        self._fleet.close()
        if self._job_records is not None:
            self._job_records.__exit__()
        if self._leave_reporter is not None:
            self._leave_reporter.close()

    def report_fields(self) -> dict[str, Any]:
        from doll.monitor.spot_history import facts
        from doll.simulation.adaptive import ADAPTIVE

        if self._fleet is None or self._decision is None:
            return {}
        found = facts(self._result, self._spot_run.predictions, ADAPTIVE, self._timeline, self._fleet.machines)
        bill = self._decision.bill.to_dict()
        return {**found, "market": self._spot_run.facts(), "bill": bill, "alarms": list(self._decision.alarms)}

    # --- WorkerPool

    def start_workers(self, forks: ForkServer, stack: Stack, spec: Callable[[Instance], RoleSpec]) -> None:
        from doll.kafka.job_records import JobRecords
        from doll.provisioner.controller import Controller
        from doll.provisioner.fleets.processes import ProcessFleet
        from doll.provisioner.prices.trace import TracePrices
        from doll.provisioner.state_store import FileStateStore

        market = self._spot_run.market
        self._fleet = ProcessFleet(
            forks, spec, self._run.path, market=market, market_clock=self._opening,
            boot_s=self._spot_run.fleet.boot_s, drain_s=self._config.worker.drain_s, clock=self._clock,
        )  # fmt: skip
        self._controller = Controller(
            self._spot_run.settings, self._fleet, TracePrices(market, self._opening),
            FileStateStore(self._run.path, self._config.job),
            probe=_MarketProbe(market, lambda: self._opening.since(self._clock())),
        )  # fmt: skip
        self._job_records = JobRecords(self._config, stack.services, {})
        self._job_records.read_history()  # of an earlier run on topics that are still there
        self._leave_reporter = _LeaveReporter(self._config, stack.services)
        self._waiting_since_s = time.monotonic()

    @property
    def workers_ready(self) -> bool:
        return self._workers_ready

    def pids(self) -> dict[str, int]:
        if self._fleet is None:
            return {}
        return {
            f"worker-{one.instance.slot}.{one.instance.incarnation}": one.pid
            for one in self._fleet.machines
            if one.pid is not None and one.instance.ended_s is None
        }

    def with_status(self, snapshot: JobSnapshot) -> JobSnapshot:
        if self._fleet is None or self._decision is None:
            return snapshot
        decision, planner = self._decision, self._spot_run.planner
        usd: dict[int, float] = {}
        for line in decision.bill.lines:
            usd[line.slot] = usd.get(line.slot, 0.0) + line.usd
        workers = tuple(
            dataclasses.replace(line, machine=self._machine(line.worker), usd=usd.get(line.worker, 0.0))
            for line in snapshot.workers
        )
        alive = decision.alive
        num_spot = sum(one.market == "spot" for one in alive)
        elapsed_s = decision.elapsed_s if self._clock.runs else 0.0
        costs = (
            f"{elapsed_s:.0f} of {planner.deadline_s:g} s, {num_spot} spot + {len(alive) - num_spot} on-demand, "
            f"{decision.bill.usd:.3f} USD, {self._preempted()} preemptions, {len(self._timeline.moves)} moves"
        )
        return dataclasses.replace(snapshot, workers=workers, costs=costs)

    def files(self) -> dict[str, Path]:
        from doll.monitor.spot_plot import draw
        from doll.provisioner.state_store import FileStateStore

        if self._fleet is None or self._decision is None:
            return {}
        picture = self._run.path / _PICTURE
        draw(
            picture, timeline=self._timeline, result=self._result, predicted=self._spot_run.predicted,
            market=self._spot_run.market, machines=self._fleet.machines, opened_s=self._opening.opened_s or 0.0,
            updates=self._target_updates, job=self._config.job,
        )  # fmt: skip
        return {"market": picture, "decisions": FileStateStore(self._run.path, self._config.job).journal}

    # --- turns

    def _read(self) -> None:
        """What workers and parameter server say."""
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
            self._tell()
        elif not self._workers_ready:
            self._workers_ready = self._all_there(decision)

    def _all_there(self, decision: Decision) -> bool:
        """Every slot works, or waits for spot as it should."""
        ready = {one.slot for one in decision.alive if one.id in decision.ready}
        waits = {
            slot
            for slot, wanted in enumerate(decision.markets)
            if wanted == "spot" and not self._spot_run.market.is_up(slot, 0.0)
        }
        return decision.phase == "run" and ready | waits == set(range(self._config.data.workers))

    def _open(self, delivered: float) -> None:
        """The source has sent so many samples: the market has opened with the first of them."""
        if delivered <= 0 or self._fleet is None or self._decision is None:
            return
        rates = self._spot_run.settings.rates_per_s
        ready = {one.slot for one in self._decision.alive if one.id in self._decision.ready}
        sent_s = delivered / max(sum(float(rates[slot]) for slot in ready), float(rates.min()))
        self._opening.open(self._clock())
        self._clock.start(ago_s=sent_s)
        self._display.say("the market has opened: machines are billed, and taken back")

    def _tell(self) -> None:
        """What has happened since the last turn."""
        for move in self._timeline.moves[self._told_moves :]:
            self._display.say(move.text())
        self._told_moves = len(self._timeline.moves)
        assert self._fleet is not None
        taken = [one for one in self._fleet.machines if one.preempted]
        if len(taken) > self._told_preempted:
            self._display.say(f"{len(taken)} preemptions until now")
            self._told_preempted = len(taken)

    def _preempted(self) -> int:
        return 0 if self._fleet is None else sum(one.preempted for one in self._fleet.machines)

    def _machine(self, slot: int) -> str:
        """What a slot runs on, in a few words."""
        assert self._fleet is not None
        assert self._decision is not None
        there = self._spot_run.market.is_up(slot, self._opening.since(self._clock()))
        words = []
        for one in (machine.instance for machine in self._fleet.machines):
            if one.slot == slot and one.ended_s is None:
                state = "leaves" if one.notice_s is not None else one.state.value
                state = "works" if state == "running" and one.id in self._decision.ready else state
                words.append(f"{one.market.replace('_', '-')} #{one.incarnation} {state}")
        return f"{' + '.join(words) or 'none'}{'' if there else ' (no spot available)'}"

    @property
    def _target_updates(self) -> int:
        """J."""
        planner = self._spot_run.planner
        return round(planner.samples / (self._config.group_size * planner.batch_size))

    @property
    def _result(self) -> Any:
        from doll.monitor.spot_history import SpotResult
        from doll.provisioner.billing import all_on_demand_usd

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
        from doll.provisioner.billing import LOCAL, bill
        from doll.provisioner.prices.trace import TracePrices

        assert self._fleet is not None
        instances = [machine.instance for machine in self._fleet.machines if machine.instance.launched_s < end_s]
        ended = [dataclasses.replace(one, ended_s=min(one.ended_s or end_s, end_s)) for one in instances]
        return bill(ended, TracePrices(self._spot_run.market, self._opening).series, LOCAL, end_s).usd


class _LeaveReporter:
    """Says Leave for workers whose machine is gone without a word: who owns the machine knows it before the lease."""

    def __init__(self, config: JobConfig, services: Services) -> None:
        from confluent_kafka import Producer

        from doll.kafka.clients import kafka_settings

        self._producer = Producer(kafka_settings(config, services, acks="all", linger_ms=0))
        self._topic = config.topic("events")
        self._sessions: dict[str, tuple[int, int]] = {}  # worker and its session, by the name of its machine
        self._reported: set[str] = set()

    def feed(self, record: AnyRecord) -> None:
        from doll.records import Welcome

        if isinstance(record, Welcome):
            self._sessions[record.instance.partition(":")[0]] = (record.worker, record.session)

    def report(self, machines: Sequence[Machine]) -> None:
        from doll.records import Leave, encode

        for machine in machines:
            id_ = machine.instance.id
            if machine.killed and machine.instance.ended_s is not None and id_ not in self._reported:
                self._reported.add(id_)
                if id_ in self._sessions:
                    worker, session = self._sessions[id_]
                    leave = Leave(worker=worker, session=session, cause="machine taken")
                    self._producer.produce(self._topic, encode(leave), key=str(worker).encode(), partition=0)
        self._producer.poll(0)

    def close(self) -> None:
        self._producer.flush(5.0)
