"""`doll up`: everything of one job on this machine, from an empty folder to an audited, exported model.

Order of effects: 1. run folder; 2. fork server, the model for a trial, Kafka and Redis; 3. topics; 4. roles;
5. learning, until the parameter server has written Finished, the source has ended, a signal arrives, or a role cannot
be kept alive; 6. the parameter server's last checkpoint, the evaluator's last evaluation; 7. audit, export, report,
plots; 8. all processes end. Whatever happens from 4 on, 7 is done with what there is; but a second signal kills all
processes at once.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

from doll import telemetry
from doll.config import JobConfig, StdinSource
from doll.errors import BadStreamError, ConfigError, DollError, ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.reader import Tail
from doll.ledger.admission import ANY_TERM, admit
from doll.local.forks import ForkServer
from doll.local.processes import describe_exit, tail
from doll.local.stack import local_stack
from doll.local.supervisor import Supervisor
from doll.monitor.state.progress import ProgressModel
from doll.monitor.views.display import Display, make_display
from doll.monitor.views.run_report import RunOutcome
from doll.process.files import is_full, unwritable
from doll.process.signals import Interrupts
from doll.run import folder as run_folder
from doll.run.folder import RunFolder, display_path
from doll.run.local.earlier_runs import check_topics
from doll.run.local.finish import finish_run
from doll.run.local.follower import RunFollower
from doll.run.local.hooks import NoHook, RunHook, WorkerPool
from doll.run.local.preflight import check_devices, check_files, check_pipeline, check_task
from doll.run.local.role_specs import RoleSpecs, launcher, taken_health_ports
from doll.run.local.running import SOURCE_ENDED, Learning, ended_early
from doll.run.local.shutdown import shut_down
from doll.storage.stores import checkpoint_location, open_store

MakeHook = Callable[[RunFolder, Display], RunHook]
MakeWorkerPool = Callable[[RunFolder, Display], WorkerPool]


def run_up(
    config: JobConfig,
    runs_folder: Path,
    *,
    hook: MakeHook | None = None,
    worker_pool: MakeWorkerPool | None = None,
    fresh: bool = False,
) -> dict[str, Any]:
    """Run the job in a new folder of `runs_folder`.

    Args:
        worker_pool: owns the workers; instead of a hook.
        fresh: begin a new generation on topics that hold an earlier run.

    Returns:
        The content of `report.json`; its `exit_code` is 0 done, 1 failed, 4 audit failed or records lost.

    Raises:
        ConfigError: the job cannot be run this way, or its topics hold an earlier run.
        ServiceUnavailableError: Kafka or Redis cannot be found or started.
    """
    check_runnable(config)
    check_topics(config, runs_folder, fresh=fresh)
    run = run_folder.create(runs_folder, config.job, datetime.now())
    config = _resolved(config, run)
    with run.locked():
        run.write_job(config)
        return run_in(run, config, hook=hook, worker_pool=worker_pool, fresh=fresh)


def check_runnable(config: JobConfig) -> None:
    """Everything that can be checked before a process is started.

    Raises:
        ConfigError: the job cannot be run this way.
    """
    if isinstance(config.source, StdinSource) and sys.stdin.isatty():
        raise ConfigError("source.kind: stdin: expected a pipe, got a terminal; as in: my-events | doll up JOB.yaml")
    check_files(config)
    check_task(config)
    check_devices(config)
    check_pipeline(config)


def run_in(
    run: RunFolder,
    config: JobConfig,
    *,
    hook: MakeHook | None = None,
    worker_pool: MakeWorkerPool | None = None,
    fresh: bool = False,
) -> dict[str, Any]:
    """Run the job in a folder that holds its resolved job file, from its checkpoints if it has any; the report."""
    with Interrupts() as interrupts, make_display(config.stop) as display:
        display.say(f"job {config.job}: run folder {display_path(run.path)}")
        owner = worker_pool(run, display) if worker_pool is not None else None
        run_hook = hook(run, display) if hook is not None else owner or NoHook()
        return _LocalRun(config, run, display, interrupts, run_hook, owner, fresh=fresh).run()


def _resolved(config: JobConfig, run: RunFolder) -> JobConfig:
    """`config` with absolute folders."""
    place = checkpoint_location(config, run.path)
    checkpoint = config.checkpoint.model_copy(update={"folder": place.resolve() if isinstance(place, Path) else place})
    return config.model_copy(update={"checkpoint": checkpoint, "base_folder": config.base_folder.resolve()})


class _LocalRun:
    """One run, from the first process to the report."""

    def __init__(
        self,
        config: JobConfig,
        run: RunFolder,
        display: Display,
        interrupts: Interrupts,
        hook: RunHook,
        worker_pool: WorkerPool | None,
        *,
        fresh: bool,
    ) -> None:
        self._config = config
        self._run = run
        self._display = display
        self._interrupts = interrupts
        self._hook = hook
        self._worker_pool = worker_pool
        self._fresh = fresh
        self._model: ProgressModel | None = None  # once the roles are started

    def run(self) -> dict[str, Any]:
        """Everything between the run folder and the report, which is returned."""
        config, run, say = self._config, self._run, self._display.say
        with contextlib.ExitStack() as open_:
            open_.push(self._say_what_is_lost)
            open_.enter_context(_logging_to(run.logs / "up.log", config.log.format))
            forks = open_.enter_context(ForkServer(run.logs / "forkserver.log"))
            say("loading torch and building the model")
            _check_model(run, forks)
            say("connecting to Kafka and Redis")
            stack = open_.enter_context(
                local_stack(config, run.path, say, advertised_ports=self._hook.advertised_ports)
            )
            if (taken := taken_health_ports(config)) is not None:
                say(f"warning: {taken}")
            for warning in topics.ensure(config, stack.services):
                say(f"warning: {warning}")
            store, place = open_store(config, run.path), checkpoint_location(config, run.path)
            seen = admit(config, stack.services, store, place, ANY_TERM if self._fresh else 0)
            after_term = seen.newest_term if self._fresh else 0
            if after_term:
                say(f"a new generation on the topics of an earlier run ({seen}), from data.start: {config.data.start}")
            model = ProgressModel(config, time.monotonic(), after_term=after_term)
            kinds = {"kafka_kind": stack.kafka_kind, "redis_kind": stack.redis_kind, "notes": stack.notes}
            run.write_stack(stack.services, **kinds)
            tail = open_.enter_context(Tail(config, stack.services, (config.topic("updates"), config.topic("metrics"))))
            follower = RunFollower(config, model, tail, self._display, run.logs, self._hook, self._worker_pool)
            supervisor = Supervisor(launcher(config, run, forks), on_restart=follower.role_restarted)
            learning = Learning(
                config,
                run,
                self._display,
                self._interrupts,
                stack,
                supervisor,
                follower,
                RoleSpecs(config, run, stack, self._hook, after_term),
                self._hook,
                self._worker_pool,
                after_term,
            )
            self._interrupts.graceful = True
            outcome = RunOutcome(
                "", 0, 0.0, started_at_s=time.time(), kafka_kind=stack.kafka_kind, redis_kind=stack.redis_kind
            )
            outcome.notes = tuple(stack.notes)
            self._learn(learning, follower, supervisor, forks, outcome)
            follower.read_to_end()
            outcome.restarts = dict(follower.restarts)
            outcome.extra = self._hook.report_fields()
            if self._worker_pool is not None:
                outcome.files = {name: display_path(path) for name, path in self._worker_pool.files().items()}
            return finish_run(config, run, model, outcome, self._display, forks, stack.services)

    def _learn(
        self,
        learning: Learning,
        follower: RunFollower,
        supervisor: Supervisor,
        forks: ForkServer,
        outcome: RunOutcome,
    ) -> None:
        """Run the roles to their end. `outcome` gets the reason, the seconds of learning, error and exit code."""
        self._model = follower.model
        started_s = time.monotonic()
        try:
            learning.start_roles(forks)
            outcome.reason = learning.run()
            self._hook.close()
            outcome.seconds = time.monotonic() - started_s
            self._check_stop_rule(outcome, follower)
            shut_down(supervisor, follower, self._display)
        except (DollError, OSError) as error:
            problem = error if isinstance(error, DollError) else unwritable(error)
            if is_full(self._run.path):  # what a broker says of it is a page of Java
                problem = ServiceUnavailableError(
                    f"no space is left on the disk of {display_path(self._run.path)}: free some, then: "
                    f"doll resume {display_path(self._run.path)}"
                )
            if problem.exit_code == BadStreamError.exit_code:
                follower.read_to_end()  # the parameter server's exit code may be seen before its last record
            if not follower.job_error:
                self._display.say(f"failed: {problem}")
                outcome.reason, outcome.error, outcome.exit_code = "failed", str(problem), problem.exit_code
            outcome.seconds = outcome.seconds or time.monotonic() - started_s
        self._hook.close()
        supervisor.stop(("producer", "ps*", "worker-*", "evaluator"), grace_s=self._config.worker.drain_s)
        self._check_stream(outcome, follower)

    def _say_what_is_lost(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """At the end of a run that was stopped at once, when everything that it started has been killed."""
        if kind is None or not issubclass(kind, KeyboardInterrupt) or self._model is None:
            return
        state = self._model.snapshot(time.monotonic())
        durable = state.durable_version or 0
        lost = ""
        if state.version > durable:
            lost = f"; updates {durable + 1} to {state.version} are lost, and their samples are learned again"
        self._display.say(
            f"stopped at once: there is no audit, model or report. Version {durable} is saved: "
            f"doll resume {display_path(self._run.path)} goes on from it{lost}"
        )

    def _check_stop_rule(self, outcome: RunOutcome, follower: RunFollower) -> None:
        """A run whose stream ended before a stop rule was met has failed."""
        stop = self._config.stop.model_dump(exclude_none=True)
        if outcome.reason == SOURCE_ENDED and stop:
            outcome.error, outcome.exit_code = ended_early(stop, follower.failures), 1

    def _check_stream(self, outcome: RunOutcome, follower: RunFollower) -> None:
        """A run whose records were refused has failed: it ended for that, or has not learned a single sample."""
        dead = follower.model.dead_letters()
        problem = follower.job_error
        if not problem and dead.letters and not follower.model.history.samples_total:
            problem = f"not one sample was usable: {dead.text()}"
        if problem:
            show = f"doll dead list {display_path(self._run.path)}"
            outcome.error, outcome.exit_code = f"{problem}. All of them: {show}", BadStreamError.exit_code
            outcome.reason = outcome.reason if outcome.reason != "failed" else "bad records"


def _check_model(run: RunFolder, forks: ForkServer) -> None:
    """Build the model once, in a process of its own: a mistake in it is found before a service is started.

    Raises:
        ConfigError: the task or its model cannot be used.
    """
    log_path = run.logs / "model.log"
    role = forks.start_role("doll.run.local.roles:model_role", [str(run.job)], log_path=log_path, name="model")
    if (code := role.wait()) != 0:
        said = [line.removeprefix("doll: ") for line in tail(log_path).splitlines() if line.startswith("doll: ")]
        problem = said[-1] if said else f"the model cannot be built: {describe_exit(code or 0)}"
        raise ConfigError(f"{problem}; the traceback is in {display_path(log_path)}")


class _Log(io.TextIOWrapper):
    """A log that a full disk makes incomplete, while the run goes on to its report. `raw` is not buffered."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.buffer.write(text.encode("utf-8", "replace"))
        return len(text)


@contextlib.contextmanager
def _logging_to(path: Path, log_format: telemetry.LogFormat) -> Iterator[None]:
    """Write the log of this process to a file: on the terminal it would break the live display."""
    with _Log(cast(BinaryIO, path.open("ab", buffering=0))) as file:
        telemetry.configure(log_format, process="up", stream=file)
        try:
            yield
        finally:
            telemetry.configure(log_format, process="up")
