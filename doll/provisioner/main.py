"""The provisioner as a process: a controller with its fleet, records, lease and publisher. Also has `drain`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from doll import telemetry
from doll.config import JobConfig
from doll.errors import CheckpointError, ConfigError, DollError, ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.clients import kafka_problem
from doll.kafka.publisher import Publisher
from doll.kafka.reader import JobRecords
from doll.process.health import Heartbeat, heartbeat_of
from doll.process.metric_names import HEARTBEAT_EVERY_S, LEFT, PROVISIONER
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.port import InstanceState
from doll.provisioner.lease import HolderState, Lease, claims_of
from doll.provisioner.machines import Machines
from doll.provisioner.planning.state import PlannerSettings
from doll.provisioner.settings import ControllerSettings
from doll.provisioner.state_store import StateStore, state_of
from doll.records.control import AnyRecord, Finished, Leave, Metric, Scale, Welcome
from doll.service_checks import require_services
from doll.services import Services


@dataclass(eq=False, repr=False)
class DecisionPublisher:
    """Sends decisions to the job's topic `metrics`, and requests to its topic `events`, which the parameter server
    reads. Sending does not wait; decisions that Kafka does not accept are in the journal."""

    publisher: Publisher
    topic: str
    events: str
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._sent_s = self.clock()

    def publish(self, decision: Decision, *, last: bool) -> None:
        """Send a decision. `last` states that this process now exits normally, so its later silence is not a failure.
        After SIGTERM, no decision with `last` is sent: machines continue to run, so the silence must be noticed."""
        values = {**decision.measurements(), **({LEFT: 1.0} if last else {})}
        self._send(decision.record(), Metric(source=PROVISIONER, values=values, time_s=decision.now_s))

    def ask(self, request: Scale) -> None:
        """Send a request to the parameter server. The caller repeats it after each decision until it is fulfilled."""
        self.publisher.try_send(self.events, request)

    def heartbeat(self) -> None:
        """Send a heartbeat if nothing was sent for `HEARTBEAT_EVERY_S`; call this method often."""
        if self.clock() - self._sent_s >= HEARTBEAT_EVERY_S:
            self._send(Metric(source=PROVISIONER, values={}, time_s=time.time()))

    def _send(self, *records: AnyRecord) -> None:
        self._sent_s = self.clock()
        for record in records:
            self.publisher.try_send(self.topic, record)

    def close(self) -> None:
        """Wait up to 5 s until Kafka has all records."""
        self.publisher.close()


POLL_S: Final = 0.2
_KAFKA_TIMEOUT_S: Final = 3.0
DRAIN_TIMEOUT_S: Final = 900.0
_DRAIN_TURN_S: Final = 2.0
_URGENT_AFTER_S: Final = 1.0  # delay after a worker joins or leaves; one turn may handle several of these

log = telemetry.get_logger(__name__)

StopRequested = Callable[[], bool]
ReadSettings = Callable[[JobConfig], tuple[ControllerSettings, list[str]]]


@dataclass(frozen=True)
class ProvisionerSetup:
    """The parts and settings of a provisioner. Its journal is in `run_folder`; its state is beside the checkpoints.

    Attributes:
        read_settings: function that returns the settings of a job file, with notes on their origin.
        load, path: function that reads the job file, and path of this file, which may be edited while the job runs.
        accept: function that is called with an edited job file when the provisioner starts to use it.
    """

    config: JobConfig
    services: Callable[[], Services]
    run_folder: Path
    machines: Callable[[JobConfig, Services, Path], AbstractContextManager[Machines]]
    read_settings: ReadSettings
    load: Callable[[], JobConfig]
    path: Path
    dry_run: bool = False
    accept: Callable[[JobConfig], None] = lambda config: None


class ProvisionerProcess:
    """A running provisioner. Use it as a context manager: call `read_history` once, then one of the loops. Raises
    ConfigError if the job file lacks the work or the rates, or if its fleet cannot be used. Raises
    ServiceUnavailableError if Kafka or Redis is not available."""

    def __init__(self, setup: ProvisionerSetup) -> None:
        self._setup = setup
        self._settings, self._notes = setup.read_settings(setup.config)
        self._logged: tuple[Any, ...] = ()

    def __enter__(self) -> Self:
        setup = self._setup
        telemetry.configure(setup.config.log.format, process="provisioner")
        config, services = setup.config, setup.services()
        require_services(config, services)
        topics.ensure(config, services)
        with ExitStack() as stack:
            self._heartbeat: Heartbeat = stack.enter_context(heartbeat_of("provisioner", config))
            machines = stack.enter_context(setup.machines(config, services, setup.run_folder))
            self._lease = lease = None
            if not setup.dry_run:
                self._lease = lease = Lease(claims_of(config, setup.run_folder), config.provision.lease_s)
            self._state_store = state_of(config, setup.run_folder, 0 if lease is None else lease.number)
            if lease is not None:
                lease.renew()
                self._state_store.take()
            self._placement = machines.placement
            self._controller = Controller(
                self._settings, machines.fleet, machines.prices, machines.billing, self._state_store,
                probe=machines.probe, check_lease=(lambda: None) if lease is None else lease.check,
                dry_run=setup.dry_run, job=config.job, topics_id=topics.topic_id(config, services, "updates"),
            )  # fmt: skip
            self._job_records = stack.enter_context(JobRecords(config, services, self._controller.state.positions))
            self._publisher = None if setup.dry_run else _publisher(config, services)
            if self._publisher is not None:
                stack.callback(self._publisher.close)
            self._open = stack.pop_all()
        log.info(
            "provisioning", fleet=config.fleet.kind, slots=self._settings.num_slots, dry_run=setup.dry_run,
            number=0 if lease is None else lease.number, journal=str(self._state_store.journal),
        )  # fmt: skip
        for note in self._notes:
            log.info("plan_note", note=note)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._open.close()

    def read_history(self) -> None:
        """Read the records that were written before this process started. If an earlier process has saved its state,
        begin at the saved positions."""
        for timed_record in self._job_records.read_history():
            self._controller.observed.feed(timed_record.record, timed_record.at_s)
            self._renew_lease()
        self._expect_turns()
        self._heartbeat.set_waiting_for("")

    def run(self, stop_requested: StopRequested) -> Decision | None:
        """Repeat turns until nothing is left to do or a person must act. Returns the last decision, or None after a
        stop request."""
        job_file = JobFile(self._setup.path, self._setup.load)
        while True:
            if (changed := job_file.changed()) is not None:
                self._retarget(changed)
            decision = self._turn()
            # If nothing can be launched, turns continue until the running machines have ended.
            if decision.finished or (decision.phase == "stopped" and not decision.alive):
                self._end_lease("ended")
                return decision
            self._follow(self._settings.planner.replan_s, stop_requested)
            if stop_requested():
                log.info("shutting_down", instances=len(decision.alive), action="all machines keep running")
                self._end_lease("left")
                return None

    def run_once(self) -> Decision:
        """Execute one turn."""
        return self._turn(last=True)

    def end_machines(self) -> Decision:
        """Repeat turns until all machines have ended, and return the last decision."""
        while True:
            decision = self._turn(draining=True)
            if decision.finished:
                self._end_lease("ended")
                return decision
            self._follow(_URGENT_AFTER_S, lambda: False)

    def _renew_lease(self) -> None:
        """Renew the lease if this is due. Raises FencedError if another provisioner has taken over."""
        try:
            if self._lease is not None:
                self._lease.renew_if_due()
        except CheckpointError as exc:  # turns do nothing until the store is available again
            log.warning("lease_not_renewed", error=str(exc))

    def _end_lease(self, state: HolderState) -> None:
        if self._lease is not None:
            self._lease.end(state)

    def _expect_turns(self) -> None:
        self._heartbeat.expect("turn", within_s=max(60.0, 10 * self._settings.planner.replan_s))

    def _retarget(self, config: JobConfig) -> None:
        """Use the settings of a job file that has changed."""
        try:
            settings, _ = self._setup.read_settings(config)
            self._controller.retarget(settings)
        except (DollError, ValueError) as error:
            log.warning("job_file_invalid", error=str(error), action="continuing with the previous settings")
            return
        self._settings = settings
        self._setup.accept(config)
        self._expect_turns()
        planner = settings.planner
        log.info(
            "plan_changed", deadline_s=planner.deadline_s, budget_usd=planner.budget_usd, samples=planner.samples,
            updates=planner.updates, group_size=planner.group_size, every_s=planner.replan_s,
        )  # fmt: skip

    def _turn(self, *, last: bool = False, draining: bool = False) -> Decision:
        """Execute one turn, publish and log its decision. `last`: this process exits afterwards."""
        self._heartbeat.beat("turn")
        now_s = time.time()
        ends = self._job_records.sample_ends()
        if ends is not None:
            self._controller.observed.observe_ends(now_s, ends)
        self._controller.state.positions = self._job_records.named_positions()
        decision = self._controller.turn(now_s, draining=draining)
        if self._publisher is not None:
            self._publisher.publish(decision, last=last or decision.finished)
            if (request := self._controller.release_request(decision)) is not None:
                self._publisher.ask(request)
        self._log_changes(decision)
        if self._placement is not None and (scores := self._placement.poll_scores(now_s)) is not None:
            log.info("placement_scores", **scores)
            if not self._setup.dry_run:
                self._state_store.append({"kind": "placement", "time_s": now_s, "scores": scores})
        return decision

    def _log_changes(self, decision: Decision) -> None:
        for result in decision.actions:
            log.info("action", what=result.text())
        current = (decision.phase, decision.markets, decision.binding, decision.alarms)
        if current == self._logged:
            return
        before, self._logged = self._logged, current
        for alarm in decision.alarms:
            if not before or alarm not in before[3]:
                log.warning("alarm", what=alarm)
        log.info(
            "decision", phase=decision.phase, binding=decision.binding, elapsed_s=round(decision.elapsed_s),
            spot=decision.markets.count("spot"), on_demand=decision.markets.count("on_demand"),
            samples=decision.samples_done, updates=decision.updates_done, spent_usd=round(decision.bill.usd, 4),
            expected_cost_usd=decision.expected_cost_usd, reasons=decision.to_dict()["reasons"],
        )  # fmt: skip

    def _follow(self, seconds: float, stop_requested: StopRequested) -> None:
        """Read records until the next turn is due, or until a worker joins or leaves, or the job ends."""
        start_s, urgent = time.monotonic(), False
        while not stop_requested() and time.monotonic() - start_s < seconds:
            self._renew_lease()
            if self._publisher is not None:
                self._publisher.heartbeat()
            for timed_record in self._job_records.poll(min(POLL_S, seconds)):
                self._controller.observed.feed(timed_record.record, timed_record.at_s)
                urgent = urgent or isinstance(timed_record.record, Finished | Leave | Welcome)
            if urgent and time.monotonic() - start_s >= min(_URGENT_AFTER_S, seconds):
                return


def _publisher(config: JobConfig, services: Services) -> DecisionPublisher:
    publisher = Publisher(config, services, linger_ms=5, message_timeout_ms=30_000)
    return DecisionPublisher(publisher, config.topic("metrics"), config.topic("events"))


def publish_last(config: JobConfig, services: Callable[[], Services], decision: Decision) -> None:
    """Publish the decision of a process that exits, if Kafka is available. No process depends on this decision."""
    try:
        resolved = services()
        if problem := kafka_problem(config, resolved, _KAFKA_TIMEOUT_S):
            raise ServiceUnavailableError(problem)
        publisher = _publisher(config, resolved)
    except DollError as error:
        log.warning("decision_not_published", reason=str(error), action="it is in the journal only")
        return
    publisher.publish(decision, last=True)
    publisher.close()


class JobFile:
    """The job file, which may be edited while the job runs. `load` reads it with the overrides of the command line."""

    def __init__(self, path: Path, load: Callable[[], JobConfig]) -> None:
        self._path = path
        self._load = load
        self._last_stamp = self._stamp()

    def _stamp(self) -> tuple[int, int]:
        try:
            stat = self._path.stat()
        except OSError:
            return (0, 0)
        return (stat.st_mtime_ns, stat.st_size)

    def changed(self) -> JobConfig | None:
        """Return the job file if it has changed since the last call, otherwise None. Logs an invalid file."""
        stamp = self._stamp()
        if stamp in (self._last_stamp, (0, 0)):
            return None
        self._last_stamp = stamp
        try:
            return self._load()
        except ConfigError as error:
            log.warning("job_file_invalid", error=str(error), action="continuing with the previous settings")
            return None


def drain(
    config: JobConfig, machines: Machines, lease: Lease, state_store: StateStore, wait: Callable[[float], bool],
    *, clock: Callable[[], float] = time.time,
) -> Decision | None:  # fmt: skip
    """End all instances of the job and wait until they have ended. `lease` is already claimed. This function only needs
    the fleet and the lease; it does not need Kafka, Redis, prices or a plan. If there is a saved state, it is updated.

    Returns the last decision, or None after a stop request. `wait(seconds)` returns False after a stop request.

    Raises:
        FencedError: another provisioner has taken over.
        ServiceUnavailableError: after `DRAIN_TIMEOUT_S`, some instances still exist or the fleet has not answered.
    """
    telemetry.configure(process="provisioner")
    controller = Controller(
        _no_plan(config), machines.fleet, machines.prices, machines.billing, _KnownState(state_store),
        check_lease=lease.check, job=config.job,
    )  # fmt: skip
    end_s = clock() + DRAIN_TIMEOUT_S
    while True:
        decision = controller.turn(clock(), draining=True)
        for result in decision.actions:
            log.info("action", what=result.text())
        if decision.finished:
            lease.end("ended")  # so that a standby ends too
            return decision
        if clock() > end_s:
            left = ", ".join(
                instance.id for instance in decision.instances if instance.state is not InstanceState.ENDED
            )
            raise ServiceUnavailableError(
                f"instances not terminated after {DRAIN_TIMEOUT_S:g} s: {left or '; '.join(decision.alarms)}; "
                "check them by hand"
            )
        if not wait(_DRAIN_TURN_S):
            return None


def _no_plan(config: JobConfig) -> ControllerSettings:
    """Return settings for a controller that does not plan."""
    return ControllerSettings(
        planner=PlannerSettings(samples=1.0, batch_size=config.data.batch_size, deadline_s=1.0),
        rates_per_s=np.ones(config.data.workers),
        machines_per_worker=config.machines_per_worker,
    )


class _KnownState:
    """The state store of a drain. If no earlier provisioner has saved a state, nothing is saved: the new state would
    lack the start of the job's clock and the cost so far, because a drain does not read the topics. A full disk does
    not stop a drain."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._is_known = store.load() is not None

    def load(self) -> dict[str, Any] | None:
        return self._store.load()

    def save(self, kept: Mapping[str, Any]) -> None:
        if self._is_known:
            self._try(self._store.save, kept)

    def append(self, entry: Mapping[str, Any]) -> None:
        self._try(self._store.append, entry)

    def _try(self, write: Callable[[Mapping[str, Any]], None], value: Mapping[str, Any]) -> None:
        try:
            write(value)
        except (ConfigError, CheckpointError) as error:
            log.warning("drain_not_noted", reason=str(error))
