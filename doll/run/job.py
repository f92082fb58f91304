"""`doll up`: everything of one job on this machine, from an empty folder to an audited, exported model.

Order of effects: 1. run folder; 2. fork server, Kafka and Redis; 3. topics; 4. roles; 5. learning, until the parameter
server says Finished, the source has ended, somebody interrupts, or a role cannot be kept alive; 6. the parameter
server's last checkpoint, the evaluator's last evaluation; 7. audit, export, plots, report; 8. all that started ends.
Whatever happens from 4 on, 7 is done with what there is.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from doll.cli.options import emit
from doll.errors import ConfigError, DollError, ServiceUnavailableError
from doll.ledger.admission import AFTER_TERM_ENV
from doll.monitor.display import Display, make_display
from doll.monitor.progress import ProgressModel
from doll.monitor.run_report import RunOutcome, summary
from doll.process.files import write_json
from doll.process.health import PORT_ENV
from doll.run import folder as runfolder
from doll.run.finish import finish_run, shown
from doll.run.folder import RunFolder
from doll.run.interrupts import Interrupts
from doll.services import BLOBS_ENV

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.kafka.tail import Tail
    from doll.local.forks import ForkServer
    from doll.local.stack import Stack
    from doll.local.supervisor import Handle, Restart, RoleSpec, Supervisor
    from doll.monitor.progress import JobSnapshot
    from doll.provisioner.fleets.port import Instance
    from doll.records import AnyRecord
    from doll.services import Services

POLL_S = 0.1
READ_ENDS_EVERY_S = 1.0
# A source that has ended leaves fewer batches than a group: nothing more will come of them.
IDLE_AFTER_SOURCE_S = 5.0
PRODUCER_START_TIMEOUT_S = 20.0
PS_STOP_S = 30.0
LAST_EVALUATION_TIMEOUT_S = 60.0
PARAMETER_SERVERS = ("ps", "ps-standby")
INTERRUPTED = "stopped by you"
SOURCE_ENDED = "the source has ended"


class RunHook(Protocol):
    """Goes along with a run, as a drill does."""

    standby: bool  # whether a second parameter server waits for the end of the first

    @property
    def advertised_ports(self) -> Sequence[Mapping[str, int]]:
        """For each broker of ours what it shall tell the clients of single roles; see `LocalKafka`."""

    def services(self, role: str, stack: Stack) -> Services:
        """Where a role finds Kafka and Redis."""

    def environment(self, role: str) -> Mapping[str, str]:
        """Additions to the environment of a role."""

    def feed(self, record: AnyRecord) -> None:
        """A record of the topics `updates` and `metrics`."""

    def turn(self, supervisor: Supervisor, stack: Stack) -> str | None:
        """Called several times a second while the job learns: why it shall end now, or None."""

    def close(self) -> None:
        """The job learns no more. It may be repeated."""

    def facts(self) -> dict[str, Any]:
        """What it adds to `report.json`."""


class WorkerPool(RunHook, Protocol):
    """A hook that owns the workers: it starts and ends them, and nobody else does."""

    def start_workers(self, forks: ForkServer, stack: Stack, spec: Callable[[Instance], RoleSpec]) -> None:
        """The parameter server starts: get the workers, each as `spec` says."""

    @property
    def workers_ready(self) -> bool:
        """Whether the source may begin."""

    def pids(self) -> dict[str, int]:
        """The processes of the workers by name."""

    def with_status(self, snapshot: JobSnapshot) -> JobSnapshot:
        """What is shown of the job, with what the worker_pool knows."""

    def files(self) -> dict[str, Path]:
        """What it leaves in the run folder, by what it is; written when the job has ended."""


def run_up(
    config: JobConfig,
    runs_folder: Path,
    *,
    as_json: bool = False,
    hook: Callable[[RunFolder, Display], RunHook] | None = None,
    worker_pool: Callable[[RunFolder, Display], WorkerPool] | None = None,
    fresh: bool = False,
) -> int:
    """Run the job; the exit code: 0 done, 1 failed, 4 audit failed or records lost.

    Args:
        worker_pool: owns the workers; in place of a hook.
        fresh: begin anew on topics that hold an earlier run.

    Raises:
        ConfigError: the job cannot be run this way, or its topics hold an earlier run.
        ServiceUnavailableError: Kafka or Redis cannot be found or started.
    """
    from doll.run.earlier_runs import check_topics

    check_runnable(config)
    check_topics(config, runs_folder, fresh=fresh)
    run = runfolder.create(runs_folder, config.job, datetime.now())
    config = _resolved(config, run)
    with run.locked():
        run.write_job(config)
        return run_in(run, config, as_json=as_json, hook=hook, worker_pool=worker_pool, fresh=fresh)


def check_runnable(config: JobConfig) -> None:
    """What can be known before anything starts.

    Raises:
        ConfigError: the job cannot be run this way.
    """
    from doll.config import StdinSource
    from doll.run.preflight import check_files, check_task

    if isinstance(config.source, StdinSource) and sys.stdin.isatty():
        raise ConfigError("source.kind: stdin: expected a pipe, got a terminal; as in: my-events | doll up JOB.yaml")
    check_files(config)
    check_task(config)


def run_in(
    run: RunFolder,
    config: JobConfig,
    *,
    as_json: bool,
    hook: Callable[[RunFolder, Display], RunHook] | None = None,
    worker_pool: Callable[[RunFolder, Display], WorkerPool] | None = None,
    fresh: bool = False,
) -> int:
    """Run the job in a folder that holds its resolved job file, from its checkpoints if it has any; the exit code."""
    with Interrupts() as interrupts, make_display(config.stop) as display:
        display.say(f"job {config.job}: run folder {shown(run.path)}")
        owner = worker_pool(run, display) if worker_pool is not None else None
        beside = hook(run, display) if hook is not None else owner
        report = _LocalRun(config, run, display, interrupts, beside, owner, fresh=fresh).run()
    emit(as_json, report, summary(report))
    return int(report["exit_code"])


def _resolved(config: JobConfig, run: RunFolder) -> JobConfig:
    """`config` with the folders that depend on where it was found made absolute."""
    from doll.storage.stores import checkpoint_location

    place = checkpoint_location(config, run.path)
    checkpoint = config.checkpoint.model_copy(update={"folder": place.resolve() if isinstance(place, Path) else place})
    return config.model_copy(update={"checkpoint": checkpoint, "base_folder": config.base_folder.resolve()})


class _LocalRun:
    """One run, from the first process to the last."""

    def __init__(
        self,
        config: JobConfig,
        run: RunFolder,
        display: Display,
        interrupts: Interrupts,
        hook: RunHook | None = None,
        worker_pool: WorkerPool | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        self._config = config
        self._fresh = fresh
        self._after_term = 0  # terms up to this one are of earlier runs on the same topics
        self._run = run
        self._display = display
        self._interrupts = interrupts
        self._hook = hook
        self._worker_pool = worker_pool
        self._model = ProgressModel(config, time.monotonic())
        self._restarts: Counter[str] = Counter()
        self._failures: dict[str, tuple[int, str]] = {}  # roles that ended by themselves: how often, last words
        self._finished = False
        self._source_started = False
        self._looked_s = 0.0
        self._pids: dict[str, int] = {}
        self._health_ports: dict[str, int] = {}

    def run(self) -> dict[str, Any]:
        """Everything between the run folder and the report."""
        from doll.kafka import topics
        from doll.kafka.tail import Tail
        from doll.ledger.admission import ANY_TERM, admit
        from doll.local.forks import ForkServer
        from doll.local.stack import local_stack
        from doll.local.supervisor import Supervisor
        from doll.storage.stores import checkpoint_location, open_store

        config, run, say = self._config, self._run, self._display.say
        with contextlib.ExitStack() as open_:
            open_.enter_context(_logging_to(run.logs / "up.log"))
            say("loading torch in the background, looking for Kafka and Redis")
            # Started first: it loads torch while the broker comes up.
            forks = open_.enter_context(ForkServer(run.logs / "forkserver.log"))
            advertised_ports = self._hook.advertised_ports if self._hook is not None else ({},)
            stack = open_.enter_context(local_stack(config, run.path, say, advertised_ports=advertised_ports))
            for warning in topics.ensure(config, stack.services):
                say(f"warning: {warning}")
            store, place = open_store(config, run.path), checkpoint_location(config, run.path)
            seen = admit(config, stack.services, store, place, ANY_TERM if self._fresh else 0)
            if self._fresh and seen.newest_term:
                self._after_term = seen.newest_term
                self._model = ProgressModel(config, time.monotonic(), after_term=self._after_term)
                say(f"a new generation on the topics of an earlier run ({seen}), from data.start: {config.data.start}")
            kinds = {"kafka_kind": stack.kafka_kind, "redis_kind": stack.redis_kind, "notes": stack.notes}
            run.write_stack(stack.services, **kinds)
            tail = open_.enter_context(Tail(config, stack.services, (config.topic("updates"), config.topic("metrics"))))
            supervisor = Supervisor(self._launcher(forks), on_restart=self._restarted)
            self._interrupts.graceful = True
            started_s = time.monotonic()
            outcome = RunOutcome("", 0, 0.0, kafka_kind=stack.kafka_kind, redis_kind=stack.redis_kind)
            outcome.notes = tuple(stack.notes)
            try:
                try:
                    self._start_roles(supervisor, stack, forks)
                    outcome.reason = self._learn(supervisor, tail, stack)
                    self._close_hook()
                    outcome.seconds = time.monotonic() - started_s
                    outcome.exit_code = self._verdict(outcome)
                    self._shut_down(supervisor, tail)
                except DollError as error:
                    say(f"failed: {error}")
                    outcome.reason, outcome.error, outcome.exit_code = "failed", str(error), error.exit_code
                    outcome.seconds = outcome.seconds or time.monotonic() - started_s
                self._close_hook()
                supervisor.stop(("producer", "ps*", "worker-*", "evaluator"), grace_s=config.worker.drain_s)
            except KeyboardInterrupt:
                say("stopped at once: nothing is saved beyond the last checkpoint")
                outcome.reason, outcome.error, outcome.exit_code = INTERRUPTED, "interrupted twice", 1
                outcome.seconds = outcome.seconds or time.monotonic() - started_s
            self._close_hook()
            self._read_to_end(tail)
            outcome.restarts = dict(self._restarts)
            if self._hook is not None:
                outcome.extra = self._hook.facts()
            if self._worker_pool is not None:
                outcome.files = {name: shown(path) for name, path in self._worker_pool.files().items()}
            return finish_run(config, run, self._model, outcome, self._display, forks, stack.services)

    def _close_hook(self) -> None:
        if self._hook is not None:
            self._hook.close()

    # --- learning

    def _start_roles(self, supervisor: Supervisor, stack: Stack, forks: ForkServer) -> None:
        config = self._config

        def start(name: str, role: str, *more: int) -> None:
            supervisor.start(self._spec(stack, name, role, *more))

        self._display.say(
            f"starting the parameter server and {config.data.workers} workers (the first waits for torch's import)"
        )
        if self._hook is not None and self._hook.standby:
            # Both wait for the other's silence: one that is started again must not take the job back.
            for name in PARAMETER_SERVERS:
                start(name, "ps_standby_role")
        else:
            start("ps", "ps_role")
        if self._worker_pool is not None:
            self._worker_pool.start_workers(
                forks, stack, lambda one: self._spec(stack, _name(one), "worker_role", one.slot)
            )
        else:
            for worker in range(config.data.workers):
                start(f"worker-{worker}", "worker_role", worker)
        if config.evaluation.enabled:
            start("evaluator", "evaluator_role")
        if config.source is None:
            self._display.say(
                f"no source in the job file: waiting for samples on topic {config.topic('samples')} at "
                f"{stack.services.kafka}, or from: doll produce --job {shown(self._run.path)} --stdin"
            )

    def _spec(self, stack: Stack, name: str, role: str, *more: int) -> RoleSpec:
        from doll.local.supervisor import RoleSpec

        services = stack.services if self._hook is None else self._hook.services(name, stack)
        common = [str(self._run.job), services.kafka, services.redis, str(self._run.path)]
        env = {} if self._config.health.base_port is not None else {PORT_ENV: str(self._health_port(name))}
        env |= {BLOBS_ENV: services.blobs}
        if self._after_term:
            env |= {AFTER_TERM_ENV: str(self._after_term)}
        env |= self._hook.environment(name) if self._hook is not None else {}
        return RoleSpec(name, f"doll.run.roles:{role}", self._run.logs / f"{name}.log", [*common, *more], env)

    def _health_port(self, name: str) -> int:
        """A port for this role's probes; it keeps it over restarts."""
        from doll.local.processes import free_port

        if name not in self._health_ports:
            self._health_ports[name] = free_port()
            write_json(self._run.health, self._health_ports)
        return self._health_ports[name]

    def _launcher(self, forks: ForkServer) -> Callable[[RoleSpec], Handle]:
        """Starts a role by a fork; but the producer that reads our standard input as a program of its own."""
        from doll.config import StdinSource
        from doll.local.processes import spawn

        def launch(spec: RoleSpec) -> Handle:
            if spec.name == "producer" and isinstance(self._config.source, StdinSource):
                argv = [sys.executable, "-m", "doll", "produce", "--job", str(self._run.path), "--stdin"]
                return spawn(argv, spec.log_path, spec.env, stdin=sys.stdin.fileno())
            return forks.launch(spec)

        return launch

    def _start_producer(self, supervisor: Supervisor, stack: Stack, waited_s: float) -> None:
        """Start the source when the workers are up: what piles up before would be learned in one burst."""
        # By what was started here: a hook may take it from the supervisor for a while.
        if self._config.source is None or self._source_started:
            return
        if self._after_term and not self._model.history.term:
            return  # the new generation's beginning says where a file goes on
        waited = waited_s > PRODUCER_START_TIMEOUT_S or all(line.is_live for line in self._model.worker_statuses())
        if self._worker_pool.workers_ready if self._worker_pool is not None else waited:
            self._source_started = True
            self._display.say("starting the producer")
            supervisor.start(self._spec(stack, "producer", "producer_role"))

    def _note_processes(self, supervisor: Supervisor) -> None:
        """Keep `roles.json` true: the process ids by name, for drills and for people who look for a process."""
        pids = {name: handle.pid for name, handle in supervisor.handles().items()}
        pids |= self._worker_pool.pids() if self._worker_pool is not None else {}
        if pids != self._pids:
            self._pids = pids
            write_json(self._run.roles, pids)

    def _restarted(self, restart: Restart) -> None:
        from doll.local.processes import describe_exit, tail

        self._restarts[restart.name] += 1
        if restart.exit_code > 0:  # not killed
            count, _ = self._failures.get(restart.name, (0, ""))
            self._failures[restart.name] = (count + 1, tail(self._run.logs / f"{restart.name}.log", 1).strip())
        text = f"{restart.name} ended with {describe_exit(restart.exit_code)}: restarted after {restart.backoff_s:g} s"
        self._model.add_event(text, time.monotonic())
        self._display.say(text)

    def _learn(self, supervisor: Supervisor, tail: Tail, stack: Stack) -> str:
        """Follow the job to its end; why it ended.

        Raises:
            DollError: a role, or the broker, cannot be kept alive.
        """
        started_s = idle_since_s = time.monotonic()
        version = -1
        while True:
            self._follow(tail)
            self._start_producer(supervisor, stack, time.monotonic() - started_s)
            if self._finished:
                finished = self._model.history.finished
                return finished.reason if finished is not None else "finished"
            if self._interrupts.stop_requested:
                self._display.say("stopping: the parameter server writes a last checkpoint (once more to stop at once)")
                return INTERRUPTED
            supervisor.poll()
            self._note_processes(supervisor)
            self._restart_dead_services(stack)
            if self._hook is not None and (reason := self._hook.turn(supervisor, stack)) is not None:
                return reason
            codes = supervisor.exit_codes()
            if codes.get("ps") == 0:
                self._read_to_end(tail)
                if not self._finished:
                    raise ServiceUnavailableError(
                        f"the parameter server ended by itself; see {self._run.logs / 'ps.log'}"
                    )
                continue
            # What workers say of their lag is up to two seconds old: the wait begins when the source has ended.
            if codes.get("producer") != 0 or self._model.history.version != version:
                idle_since_s, version = time.monotonic(), self._model.history.version
            if codes.get("producer") == 0 and self._all_read() and self._idle(time.monotonic() - idle_since_s):
                return SOURCE_ENDED

    def _follow(self, tail: Tail) -> None:
        """Take in what is new and show it; returns after `POLL_S` at the latest."""
        for one in tail.poll(POLL_S):
            self._feed(one.topic, one.offset, one.record, tail)
        now_s = time.monotonic()
        if not self._model.rate_is_stated and now_s - self._looked_s > READ_ENDS_EVERY_S:
            self._looked_s = now_s
            ends = tail.partition_ends(self._config.topic("samples"), self._config.data.workers)
            if ends is not None:
                self._model.observe_ends(time.monotonic(), ends)
        self._display.show(self._snapshot)

    def _snapshot(self) -> JobSnapshot:
        snapshot = self._model.snapshot(time.monotonic())
        return snapshot if self._worker_pool is None else self._worker_pool.with_status(snapshot)

    def _read_to_end(self, tail: Tail) -> None:
        """Take in all that there is by now."""
        for one in tail.read_to_end():
            self._feed(one.topic, one.offset, one.record, tail)

    def _feed(self, topic: str, offset: int, record: Any, tail: Tail) -> None:
        num_events = len(self._model.all_events)
        self._model.feed(record)
        if self._hook is not None:
            self._hook.feed(record)
        for _, text in self._model.all_events[num_events:]:
            self._display.say(text)
        # A Finished of an earlier run of this job is history: its topics may outlive it on a broker that is not ours.
        if topic == self._config.topic("updates") and offset >= tail.ends[topic]:
            self._finished = self._model.history.finished is not None

    def _all_read(self) -> bool:
        """Whether the workers are up and have read all there is, by what the parameter server says."""
        return all(line.is_live and line.lag_records == 0 for line in self._model.worker_statuses())

    def _idle(self, waited_s: float) -> bool:
        """Whether no update for so long means that none will come: a group may still be computed, even one by one."""
        group_s = self._config.group_size * self._model.history.service_s()
        return waited_s > max(IDLE_AFTER_SOURCE_S, 3 * group_s if math.isfinite(group_s) else 0.0)

    def _restart_dead_services(self, stack: Stack) -> None:
        """Start a broker or Redis of ours again that has died; everybody waits for it meanwhile."""

        def note(name: str, key: str) -> None:
            text = f"{name} died: starting it again"
            self._restarts[key] += 1
            self._model.add_event(text, time.monotonic())
            self._display.say(text)

        if stack.kafka is not None and (dead := stack.kafka.dead_nodes()):
            for number in dead:
                note("Kafka" if len(stack.kafka.nodes) == 1 else f"Kafka's broker {number}", "kafka")
            stack.kafka.restart_dead()
        if stack.redis is not None and stack.redis.pid is None:
            note("Redis", "redis")
            stack.redis.start()

    def _verdict(self, outcome: RunOutcome) -> int:
        """1 where the stream ended before a stop rule was met."""
        stop = self._config.stop.model_dump(exclude_none=True)
        if outcome.reason == SOURCE_ENDED and stop:
            outcome.error = ended_early(stop, self._failures)
            return 1
        return 0

    # --- the end

    def _shut_down(self, supervisor: Supervisor, tail: Tail) -> None:
        """Let the parameter server save and say Stop, then the evaluator measure the last version."""
        handles = supervisor.handles()
        if (producer := handles.get("producer")) is not None:
            producer.terminate()
        if servers := [handles[name] for name in PARAMETER_SERVERS if name in handles]:
            self._display.say("saving the last checkpoint")
            if not self._finish(servers, tail):
                self._display.say(f"the parameter server does not end within {PS_STOP_S:g} s: killed")
                for ps in servers:
                    ps.kill()
        if (evaluator := handles.get("evaluator")) is not None:
            self._display.say("evaluating the last version")
            self._await(evaluator, LAST_EVALUATION_TIMEOUT_S if self._finished else POLL_S, tail)

    def _finish(self, servers: Sequence[Handle], tail: Tail) -> bool:
        """Have the parameter server end the job; False when it, or its standby, does not end in time."""
        from doll.local.forks import Role

        for _ in range(round(PS_STOP_S)):
            # SIGINT ends the job, SIGTERM would only end the process. Early in its life it does not listen yet; a
            # standby does not heed it.
            for ps in servers:
                if not self._finished and isinstance(ps, Role):
                    ps.send_signal(signal.SIGINT)
            if all(self._await(ps, 1.0, tail) for ps in servers):
                return True
        return False

    def _await(self, handle: Handle, timeout_s: float, tail: Tail) -> bool:
        """Follow the job until a process has ended; False when it has not in time."""
        deadline_s = time.monotonic() + timeout_s
        while handle.poll() is None:
            if time.monotonic() > deadline_s:
                return False
            self._follow(tail)
        return True


def ended_early(stop: Mapping[str, float], failures: Mapping[str, tuple[int, str]]) -> str:
    """What to tell of a source that ended before a stop rule was met.

    Args:
        failures: of roles that ended by themselves: how often, and the last words of their logs.
    """
    rules = ", ".join(f"{name} {value:g}" for name, value in stop.items())
    failed = "; ".join(
        f"{name} failed {count} times, at last with: {words}" for name, (count, words) in sorted(failures.items())
    )
    return f"the source ended before the stop rule ({rules}) was met: {failed or 'give it more samples'}"


def _name(instance: Instance) -> str:
    """Two machines of one slot may run at a time, so a worker is named for both numbers."""
    return f"worker-{instance.slot}.{instance.incarnation}"


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """This process's own log goes to a file: on the terminal it would tear the live display."""
    import structlog

    from doll import telemetry

    telemetry.configure(process="up")
    with path.open("a", encoding="utf-8", buffering=1) as file:
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=file))
        try:
            yield
        finally:
            structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=sys.stderr))
