"""`doll provision`: machines for a job's workers, bought where they are cheapest in time, and handed back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from doll.cli.errors import DollGroup
from doll.cli.options import JobArgument, JobOption, JsonOption, RunFolderOption, SetOption, target
from doll.cli.output import emit

if TYPE_CHECKING:
    from collections.abc import Callable

    from doll.config import JobConfig
    from doll.kafka.job_records import JobRecords
    from doll.process.health import Heartbeat
    from doll.provisioner.controller import Controller, ControllerSettings, Decision
    from doll.provisioner.lease import Lease
    from doll.provisioner.machines import Machines
    from doll.records import AnyRecord
    from doll.run.target import Target

POLL_S = 0.2
DRAIN_TURN_S = 2.0
DRAIN_TIMEOUT_S = 900.0

provision_app = typer.Typer(
    cls=DollGroup, help="Buy machines for the workers: meet the deadline at the least cost.", rich_markup_mode=None
)
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Decide and say, but start and end nothing.")]


@provision_app.callback(invoke_without_command=True)
def provision(
    context: typer.Context,
    job_option: JobOption = None,
    overrides: SetOption = None,
    run_folder: RunFolderOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Buy machines for a job's workers, watch them, move them between the markets, and hand them back at its end.

    Without a sub-command the same as: doll provision run

    Example: doll provision --job my.yaml --dry-run
    """
    if context.invoked_subcommand is None:
        run(None, job_option, overrides, run_folder, dry_run)
    elif job_option is not None or overrides or run_folder is not None or dry_run:
        from doll.cli.errors import usage

        raise usage(f"expected options after the sub-command, as in: doll provision {context.invoked_subcommand} --job")


@provision_app.command(short_help="Provision until the job has ended.")
def run(
    job: JobArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    run_folder: RunFolderOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Provision until the job has ended, then hand everything back. SIGTERM or Ctrl-C leaves all machines running.

    It goes on where an earlier one was, and takes over from one that still runs. Deadline, budget and work may be
    changed in the job file meanwhile.

    Example: doll provision run my.yaml
    """
    raise typer.Exit(_provision(target(job, job_option, overrides, run_folder), overrides or [], dry_run=dry_run))


@provision_app.command(short_help="One turn, then leave.")
def once(
    job: JobArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    run_folder: RunFolderOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Look, decide and act once. With --dry-run nothing is changed.

    Example: doll provision once my.yaml --dry-run
    """
    at = target(job, job_option, overrides, run_folder)
    raise typer.Exit(_provision(at, overrides or [], dry_run=dry_run, once=True, as_json=as_json))


@provision_app.command(short_help="Hand every machine of the job back.")
def drain(
    job: JobArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """End every machine of the job and wait until they are gone; a provisioner that runs is stopped by it.

    Workers finish or hand back what they hold. The job stays as it is: doll provision run goes on with it. Do this
    before `terraform destroy`, which knows nothing of these machines.

    Example: doll provision drain my.yaml
    """
    at = target(job, job_option, overrides, run_folder)
    raise typer.Exit(_drain(at, as_json=as_json))


@provision_app.command(short_help="Slots, markets, machines, cost and reasons.")
def status(
    job: JobArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the provisioner last decided and why, from its journal. It changes nothing, and needs no service.

    Example: doll provision status my.yaml
    """
    at = target(job, job_option, overrides, run_folder)
    found = last_decision(at)
    try:
        text = _status_text(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        from doll.errors import ConfigError

        where = found["journal"]
        raise ConfigError(f"{where}: expected a decision of this release ({type(error).__name__}: {error})") from error
    emit(as_json, found, text)


# --- the settings ---------------------------------------------------------------------------------------------------


def controller_settings(config: JobConfig) -> tuple[ControllerSettings, list[str]]:
    """What the job file asks of its provisioner, and notes on where its numbers come from.

    Raises:
        ConfigError: the work or the rates are not known, or a number is out of its range.
    """
    import math

    import numpy as np

    from doll.cli.plan import apply_speed_up, work
    from doll.config import ProcessesFleetConfig
    from doll.errors import ConfigError
    from doll.provisioner.billing import EC2_LINUX, LOCAL
    from doll.provisioner.controller import ControllerSettings
    from doll.provisioner.planning.state import PlannerSettings
    from doll.provisioner.reconcile import LaunchLimits

    notes: list[str] = []
    plan, own = apply_speed_up(config, config.plan, notes), config.provision
    rates = config.rates_per_s()
    if not all(math.isfinite(rate) for rate in rates):
        raise ConfigError(
            "arrivals.process is asap, which states no rate: expected poisson or deterministic, with "
            "arrivals.rate_per_s as the samples per second that come to each worker"
        )
    updates, _ = work(config, plan, notes)
    samples = updates * config.group_size * config.data.batch_size
    deadline_s = plan.deadline_s
    if deadline_s is None:
        deadline_s = 2 * samples / (max(plan.alpha, 0.01) * sum(rates))
        notes.append(f"no plan.deadline_s: cost alone counts, as if it were {deadline_s:.0f} s")
    every_s = own.every_s if own.every_s is not None else max(1.0, min(30.0, deadline_s / 200))
    local = isinstance(config.fleet, ProcessesFleetConfig)
    pool_backoff_s = own.pool_backoff_s if own.pool_backoff_s is not None else 0.0 if local else 180.0
    try:
        planner = PlannerSettings(
            samples=samples, group_size=config.group_size, batch_size=config.data.batch_size, deadline_s=deadline_s,
            budget_usd=plan.budget_usd, replan_s=every_s, boot_s=plan.boot_s, cycle_s=plan.cycle_s, rule=own.rule,
            guard=own.deadline_guard, margin=plan.margin, risk=plan.risk, spot_stable_s=own.spot_stable_s,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"plan: {error}") from error
    limits = LaunchLimits(
        launches_per_min=own.launches_per_min, fallbacks_per_min=own.fallbacks_per_min, retry_s=min(30.0, 2 * every_s),
        pool_backoff_s=pool_backoff_s, early_s=min(3600.0, plan.cycle_s / 10), backoff_s=2 * every_s,
        boot_timeout_s=own.boot_timeout_s, silence_timeout_s=own.replace_after_s,
    )  # fmt: skip
    found = ControllerSettings(
        planner=planner, rates_per_s=np.asarray(rates), samples_per_record=config.data.samples_per_record,
        prior_alpha=plan.alpha, limits=limits, billing=EC2_LINUX if config.fleet.kind == "ec2" else LOCAL,
        heartbeat_timeout_s=own.heartbeat_timeout_s, target_error=plan.target_error if own.re_estimate else None, measure=plan.measure,
    )  # fmt: skip
    return found, notes


# --- a provisioner that runs ----------------------------------------------------------------------------------------


def _provision(at: Target, overrides: list[str], *, dry_run: bool, once: bool = False, as_json: bool = False) -> int:
    """Turns until it is over, somebody interrupts, or one was asked for; the exit code."""
    from doll.process.signals import Interrupts

    settings, notes = controller_settings(at.config)
    with Interrupts() as interrupts, _ControllerRuntime(at, settings, dry_run=dry_run) as runtime:
        for note in notes:
            runtime.log.info("plan_note", note=note)
        runtime.read_history()
        interrupts.graceful = True
        source = _JobFile(at, overrides)
        while True:
            runtime.heartbeat.beat("turn")
            if (changed := source.changed()) is not None:
                runtime.retarget(changed)
            decision = runtime.turn(last=once)
            if once:
                emit(as_json, {**decision.to_dict(), "bill": decision.bill.to_dict()}, decision_text(decision))
                return 0
            if decision.over:
                emit(False, {}, decision_text(decision))
                return 0
            if decision.phase == "stopped":
                emit(False, {}, decision_text(decision))
                return 1
            runtime.follow(runtime.replan_s, lambda: interrupts.stop_requested)
            if interrupts.stop_requested:
                runtime.log.info("leaving", instances=len(decision.alive), action="all machines are left as they are")
                return 0


def _drain(at: Target, *, as_json: bool) -> int:
    from doll.errors import ServiceUnavailableError
    from doll.process.signals import Interrupts

    settings, _ = controller_settings(at.config)
    with Interrupts() as interrupts, _ControllerRuntime(at, settings, dry_run=False) as runtime:
        runtime.read_history()
        interrupts.graceful = True
        end_s = time.monotonic() + DRAIN_TIMEOUT_S
        while not interrupts.stop_requested:
            decision = runtime.turn(draining=True)
            if decision.over:
                emit(as_json, {**decision.to_dict(), "bill": decision.bill.to_dict()}, decision_text(decision))
                return 0
            if time.monotonic() > end_s:
                left = ", ".join(one.id for one in decision.instances if one.ended_s is None)
                raise ServiceUnavailableError(f"not ended after {DRAIN_TIMEOUT_S:g} s: {left}; look at them by hand")
            runtime.follow(DRAIN_TURN_S, lambda: interrupts.stop_requested)
    return 1


class _JobFile:
    """The job file, which may be edited while the job runs."""

    def __init__(self, at: Target, overrides: list[str]) -> None:
        self._path = at.path
        self._overrides = overrides
        self._seen = self._stamp()

    def _stamp(self) -> tuple[int, int]:
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0)
        return (found.st_mtime_ns, found.st_size)

    def changed(self) -> JobConfig | None:
        """The job file as it now is, if it has changed; None for one that is wrong, which is told."""
        from doll.config import load
        from doll.errors import ConfigError
        from doll.telemetry import get_logger

        stamp = self._stamp()
        if stamp == self._seen or stamp == (0, 0):
            return None
        self._seen = stamp
        try:
            return load(self._path, self._overrides)
        except ConfigError as error:
            get_logger(__name__).warning("job_file_invalid", error=str(error), action="going on as before")
            return None


class _ControllerRuntime:
    """A controller with all that it needs: fleet, prices, records, lease, health, and a publisher on `metrics`."""

    def __init__(self, at: Target, settings: ControllerSettings, *, dry_run: bool) -> None:
        from doll.telemetry import get_logger

        self._at = at
        self._settings = settings
        self._dry_run = dry_run
        self._logged: tuple[Any, ...] = ()
        self.log = get_logger(__name__)

    def __enter__(self) -> _ControllerRuntime:
        from contextlib import ExitStack

        from doll import telemetry
        from doll.kafka import topics
        from doll.kafka.job_records import JobRecords
        from doll.process.health import heartbeat_of
        from doll.provisioner.controller import Controller
        from doll.provisioner.lease import Lease, claims_of
        from doll.provisioner.machines import machines_of
        from doll.provisioner.state_store import FileStateStore
        from doll.service_checks import require_services

        at = self._at
        telemetry.configure(process="provisioner")
        services = at.services()
        require_services(at.config, services)
        topics.ensure(at.config, services)
        with ExitStack() as opened:
            self.heartbeat: Heartbeat = opened.enter_context(heartbeat_of("provisioner", at.config))
            machines: Machines = opened.enter_context(machines_of(at.config, services, at.run))
            lease: Lease | None = None if self._dry_run else Lease(claims_of(at.config, at.run.path))
            self._state_store, self._placement = FileStateStore(at.run.path, at.config.job), machines.placement
            self.controller: Controller = Controller(
                self._settings, machines.fleet, machines.prices, self._state_store, probe=machines.probe,
                check_lease=None if lease is None else lease.check, dry_run=self._dry_run, job=at.config.job,
                topics_id=topics.topic_id(at.config, services, "updates"),
            )  # fmt: skip
            self._job_records: JobRecords = opened.enter_context(
                JobRecords(at.config, services, self.controller.positions)
            )
            self._publisher = _MetricsPublisher(at.config, services) if not self._dry_run else None
            if self._publisher is not None:
                opened.callback(self._publisher.close)
            self._opened = opened.pop_all()
        self.log.info(
            "provisioning", fleet=at.config.fleet.kind, slots=self._settings.num_slots, dry_run=self._dry_run,
            number=0 if lease is None else lease.number, journal=str(self._state_store.journal),
        )  # fmt: skip
        return self

    def __exit__(self, *exc: Any) -> None:
        self._opened.close()

    @property
    def replan_s(self) -> float:
        """The longest time between two turns, as the job file now asks."""
        return self._settings.planner.replan_s

    def _expect_turns(self) -> None:
        self.heartbeat.expect("turn", within_s=max(60.0, 10 * self.replan_s))

    def read_history(self) -> None:
        """What was written before, or since an earlier provisioner saved its state."""
        for timed_record in self._job_records.read_history():
            self.controller.feed(timed_record.record, timed_record.at_s)
        self._expect_turns()
        self.heartbeat.set_waiting_for("")

    def retarget(self, config: JobConfig) -> None:
        """The job file has changed."""
        from doll.errors import DollError

        try:
            settings, _ = controller_settings(config)
            self.controller.retarget(settings)
        except (DollError, ValueError) as error:
            self.log.warning("job_file_invalid", error=str(error), action="going on as before")
            return
        self._settings = settings
        self._expect_turns()
        planner = settings.planner
        self.log.info(
            "plan_changed", deadline_s=planner.deadline_s, budget_usd=planner.budget_usd, samples=planner.samples,
            updates=planner.updates, group_size=planner.group_size, every_s=planner.replan_s,
        )  # fmt: skip

    def turn(self, *, draining: bool = False, last: bool = False) -> Decision:
        """One turn, told to everybody; `last`: nobody is to miss us afterwards."""
        now_s = time.time()
        ends = self._job_records.sample_ends()
        if ends is not None:
            self.controller.observe_ends(now_s, ends)
        self.controller.positions = self._job_records.positions
        decision = self.controller.turn(now_s, draining=draining)
        if self._publisher is not None:
            self._publisher.publish(decision, last=last or decision.over)
        self._log_changes(decision)
        if self._placement is not None and not draining and (scores := self._placement.poll_scores(now_s)) is not None:
            self.log.info("placement_scores", **scores)
            if not self._dry_run:
                self._state_store.append({"kind": "placement", "time_s": now_s, "scores": scores})
        return decision

    def _log_changes(self, decision: Decision) -> None:
        """What is new, for whoever reads the log."""
        for one in decision.actions:
            self.log.info("action", what=one.text())
        current = (decision.phase, decision.markets, decision.binding, decision.alarms)
        if current == self._logged:
            return
        before, self._logged = self._logged, current
        for alarm in decision.alarms:
            if not before or alarm not in before[3]:
                self.log.warning("alarm", what=alarm)
        self.log.info(
            "decided", phase=decision.phase, binding=decision.binding, elapsed_s=round(decision.elapsed_s),
            spot=decision.markets.count("spot"), on_demand=decision.markets.count("on_demand"),
            samples=decision.samples_done, updates=decision.updates_done, spent_usd=round(decision.bill.usd, 4),
            expected_cost_usd=decision.expected_cost_usd, reasons=decision.to_dict()["reasons"],
        )  # fmt: skip

    def follow(self, seconds: float, should_stop: Callable[[], bool]) -> None:
        """Read on until the next turn is due; earlier where a worker comes or goes, or the job ends."""
        from doll.records import Finished, Leave, Welcome

        start_s, urgent = time.monotonic(), False
        while not should_stop() and time.monotonic() - start_s < seconds:
            if self._publisher is not None:
                self._publisher.beat()
            for timed_record in self._job_records.poll(min(POLL_S, seconds)):
                self.controller.feed(timed_record.record, timed_record.at_s)
                urgent = urgent or isinstance(timed_record.record, Finished | Leave | Welcome)
            if urgent and time.monotonic() - start_s >= min(1.0, seconds):
                return


class _MetricsPublisher:
    """Publishes decisions on the job's topic `metrics`. What cannot be sent is in the journal."""

    def __init__(self, config: JobConfig, services: Any) -> None:
        from confluent_kafka import Producer

        from doll.kafka.clients import kafka_settings

        self._producer = Producer(kafka_settings(config, services, linger_ms=5, message_timeout_ms=30_000))
        self._topic = config.topic("metrics")
        self._beat_s = time.monotonic()

    def publish(self, decision: Decision, *, last: bool) -> None:
        from doll.monitor.heartbeats import LEFT
        from doll.records import Metric

        # Whose machines are all handed back is not missed; SIGTERM leaves them, and then somebody should watch them.
        values = {**decision.measurements(), **({LEFT: 1.0} if last else {})}
        metric = Metric(source="provisioner", values=values, time_s=decision.now_s)
        self._send(decision.record(), metric)

    def beat(self) -> None:
        """A sign of life between two turns; call it often."""
        from doll.monitor.heartbeats import HEARTBEAT_EVERY_S
        from doll.records import Metric

        if time.monotonic() - self._beat_s >= HEARTBEAT_EVERY_S:
            self._beat_s = time.monotonic()
            self._send(Metric(source="provisioner", values={}, time_s=time.time()))

    def _send(self, *records: AnyRecord) -> None:
        from doll.records import encode

        for record in records:
            try:
                self._producer.produce(self._topic, encode(record))
            except BufferError:
                return
        self._producer.poll(0)

    def close(self) -> None:
        self._producer.flush(5.0)


# --- for people -----------------------------------------------------------------------------------------------------


def last_decision(at: Target) -> dict[str, Any]:
    """The last decision in the journal, with the instances of the state file.

    Raises:
        ConfigError: nothing was decided yet.
    """
    from doll.bounded import json_object
    from doll.errors import ConfigError
    from doll.provisioner.state_store import FileStateStore

    state_store = FileStateStore(at.run.path, at.config.job)
    found: dict[str, Any] | None = None
    placement: dict[str, int] | None = None
    try:
        # Lines are long; the newest decision is near the end.
        with state_store.journal.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4_000_000))
            for line in file.read().splitlines():
                try:
                    entry = json_object(line)
                except ValueError:
                    continue  # cut at the front, or by a crash
                if entry.get("kind") == "decision":
                    found = entry
                elif entry.get("kind") == "placement":
                    placement = entry.get("scores")
    except OSError:
        pass
    if found is None:
        raise ConfigError(f"{state_store.journal}: no decision yet: start it with: doll provision run {at.path}")
    state = state_store.load() or {}
    more = {} if placement is None else {"placement_scores": placement}
    return {**found, **more, "instances": state.get("known", []), "journal": str(state_store.journal)}


def decision_text(decision: Decision) -> str:
    """A decision for people."""
    instances = [{"slot": one.slot, "incarnation": one.incarnation, "market": one.market, "id": one.id, "pool": one.pool,
                  "state": one.state.value, "ready": one.id in decision.ready}
                 for one in decision.instances if one.ended_s is None]  # fmt: skip
    return _status_text({**decision.to_dict(), "instances": instances})


def _status_text(found: dict[str, Any]) -> str:
    def number(name: str, form: str = ".4f", unit: str = "") -> str:
        value = found.get(name)
        return "?" if value is None else f"{value:{form}}{unit}"

    # In updates too where the policy fixes the batches of an update.
    target_updates = found.get("target_updates")
    updates = "" if target_updates is None else f" (updates {number('updates_done', 'g')} of {target_updates:g})"
    lines = [
        f"{'dry run, ' if found.get('dry_run') else ''}{found['phase']}; {found['binding']} decides"
        + ("" if found["feasible"] else "; the deadline cannot be met"),
        f"  clock    {number('elapsed_s', '.0f', ' s')}, samples {number('samples_done', '.0f')} of "
        f"{number('target_samples', '.0f')}{updates}, expected end {number('expected_finish_s', '.0f', ' s')}",
        f"  cost     {number('spent_usd')} USD ({number('spent_spot_usd')} spot, {number('spent_on_demand_usd')} "
        f"on-demand), expected {number('expected_cost_usd')}; all on-demand until now {number('all_on_demand_usd')}",
        f"           {number('usd_per_1000_updates')} USD per 1000 updates, {number('usd_per_error_point')} USD per point "
        "of error",
        f"  prices   {number('spot_usd_per_h')} spot, {number('on_demand_usd_per_h')} on-demand USD/h; availability "
        f"{number('availability', '.3f')}; {number('moves_total', '.0f')} moves, "
        f"{number('interruptions_total', '.0f')} interruptions",
    ]
    if scores := found.get("placement_scores"):
        text = ", ".join(f"{zone} {score}" for zone, score in scores.items())
        lines.append(f"  zones    EC2's spot placement scores for all workers, of 10: {text}")
    markets = found["markets"]
    for reason, slots in found["reasons"].items():
        lines.append(f"  slots {slots}: {reason}")
    by_slot: dict[int, list[dict[str, Any]]] = {}
    for one in found.get("instances", []):
        by_slot.setdefault(one["slot"], []).append(one)
    if by_slot:
        lines.append("  slot  wanted     machines")
    for slot in sorted(by_slot):
        wanted = markets[slot] if 0 <= slot < len(markets) else ""
        there = ", ".join(
            f"{one['id']} ({one['market']}, incarnation {one['incarnation']}, {one['pool']}, {one['state']}"
            f"{', ready' if one.get('ready') else ''})"
            for one in by_slot[slot]
        )
        lines.append(f"  {slot:>4}  {wanted or 'none':<9}  {there}")
    lines += [f"  did: {one}" for one in found["actions"]]
    lines += [f"  waits: slots {slots}: {why}" for why, slots in found["waits"].items()]
    lines += [f"  ALARM: {one}" for one in found["alarms"]]
    return "\n".join(lines)
