"""`doll up`: everything of one job on this machine, from an empty folder to an audited, exported model.

Order of effects: 1. run folder; 2. fork server, Kafka and Redis; 3. topics; 4. roles; 5. learning, until the parameter
server has written Finished, the source has ended, a signal arrives, or a role cannot be kept alive; 6. the parameter
server's last checkpoint, the evaluator's last evaluation; 7. audit, export, plots, report; 8. all processes end.
Whatever happens from 4 on, 7 is done with what there is.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import structlog

from doll import telemetry
from doll.config import JobConfig, StdinSource
from doll.errors import ConfigError, DollError
from doll.kafka import topics
from doll.kafka.tail import Tail
from doll.ledger.admission import ANY_TERM, admit
from doll.local.forks import ForkServer
from doll.local.stack import local_stack
from doll.local.supervisor import Supervisor
from doll.monitor.display import Display, make_display
from doll.monitor.progress import ProgressModel
from doll.monitor.run_report import RunOutcome
from doll.process.signals import Interrupts
from doll.run import folder as run_folder
from doll.run.earlier_runs import check_topics
from doll.run.finish import finish_run
from doll.run.folder import RunFolder, display_path
from doll.run.follower import RunFollower
from doll.run.hooks import NoHook, RunHook, WorkerPool
from doll.run.learning import INTERRUPTED, SOURCE_ENDED, Learning, ended_early
from doll.run.preflight import check_devices, check_files, check_pipeline, check_task
from doll.run.role_specs import RoleSpecs, launcher
from doll.run.shutdown import shut_down
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

    def run(self) -> dict[str, Any]:
        """Everything between the run folder and the report, which is returned."""
        config, run, say = self._config, self._run, self._display.say
        with contextlib.ExitStack() as open_:
            open_.enter_context(_logging_to(run.logs / "up.log"))
            say("loading torch in the background, connecting to Kafka and Redis")
            # Started first: it imports torch while the broker starts.
            forks = open_.enter_context(ForkServer(run.logs / "forkserver.log"))
            stack = open_.enter_context(
                local_stack(config, run.path, say, advertised_ports=self._hook.advertised_ports)
            )
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
            outcome = RunOutcome("", 0, 0.0, kafka_kind=stack.kafka_kind, redis_kind=stack.redis_kind)
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
        say = self._display.say
        started_s = time.monotonic()
        try:
            try:
                learning.start_roles(forks)
                outcome.reason = learning.run()
                self._hook.close()
                outcome.seconds = time.monotonic() - started_s
                self._check_stop_rule(outcome, follower)
                shut_down(supervisor, follower, self._display)
            except DollError as error:
                say(f"failed: {error}")
                outcome.reason, outcome.error, outcome.exit_code = "failed", str(error), error.exit_code
                outcome.seconds = outcome.seconds or time.monotonic() - started_s
            self._hook.close()
            supervisor.stop(("producer", "ps*", "worker-*", "evaluator"), grace_s=self._config.worker.drain_s)
        except KeyboardInterrupt:
            say("stopped at once: the last checkpoint is all that is saved")
            outcome.reason, outcome.error, outcome.exit_code = INTERRUPTED, "interrupted twice", 1
            outcome.seconds = outcome.seconds or time.monotonic() - started_s
        self._hook.close()

    def _check_stop_rule(self, outcome: RunOutcome, follower: RunFollower) -> None:
        """A run whose stream ended before a stop rule was met has failed."""
        stop = self._config.stop.model_dump(exclude_none=True)
        if outcome.reason == SOURCE_ENDED and stop:
            outcome.error, outcome.exit_code = ended_early(stop, follower.failures), 1


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Write the log of this process to a file: on the terminal it would break the live display."""
    telemetry.configure(process="up")
    with path.open("a", encoding="utf-8", buffering=1) as file:
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=file))
        try:
            yield
        finally:
            structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=sys.stderr))
