"""`doll up`: runs all parts of one job on this machine, from an empty folder to an audited, exported model.

Order of effects: 1. run folder; 2. start of the fork server, trial build of the model, start of Kafka and Redis; 3.
topics; 4. roles; 5. learning, until the parameter server has written Finished, the source has ended, a signal arrives,
or a role cannot be kept running; 6. the parameter server's last checkpoint, the evaluator's last evaluation; 7. audit,
export, report, page; 8. all processes end. After any error from step 4 on, step 7 is still done with the existing
results. A second signal, however, kills all processes immediately.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from doll import telemetry
from doll.config import FeedSource, JobConfig, RayFleetConfig, StdinSource, load
from doll.config.step_size import advice, step_text
from doll.errors import BadStreamError, ConfigError, DollError, FencedError, ServiceUnavailableError
from doll.extras import require
from doll.kafka import topics
from doll.kafka.clients import kafka_problem
from doll.kafka.foreign_topic import with_partitions
from doll.kafka.reader import Tail
from doll.ledger.admission import ANY_TERM, admit, read_lineage, recorded_partitions, refuse_earlier_run
from doll.local.forks import ForkServer
from doll.local.processes import describe_exit, tail
from doll.local.stack import local_stack
from doll.monitor.state.progress import ProgressModel
from doll.monitor.views.display import Display, make_display
from doll.monitor.views.run_report import RunOutcome
from doll.process.files import is_full, read_json, unwritable
from doll.process.signals import Interrupts
from doll.producers.feed import check_program
from doll.ps.standby import LeaderCheck
from doll.run.folder import JOB, STACK, RunFolder, cluster_of, create, display_path
from doll.run.local.actors import ActorWorkers
from doll.run.local.challengers import check_recipe
from doll.run.local.context import LocalRun, RunHook, taken_health_ports
from doll.run.local.finish import finish_run
from doll.run.local.follower import RunFollower
from doll.run.local.page import end_page, start_page
from doll.run.local.preflight import check_devices, check_files, check_pipeline, check_task
from doll.run.local.provisioning import check_actors
from doll.run.local.running import SOURCE_ENDED, Learning, ended_early
from doll.services import KAFKA_ENV, Services, kafka_address
from doll.storage.stores import checkpoint_location, find_source, open_store

MakeHook = Callable[[RunFolder, Display], RunHook]

_REACHABLE_S: Final = 5.0


def run_up(
    config: JobConfig,
    runs_folder: Path,
    *,
    hook: MakeHook | None = None,
    fresh: bool = False,
    folder: RunFolder | None = None,
    display: Display | None = None,
    page: bool = False,
) -> dict[str, Any]:
    """Run the job in a new folder of `runs_folder`.

    Args:
        hook: creates the hook of the run. None: the default hook.
        fresh: begin a new generation on topics that contain an earlier run.
        folder: run folder that already exists for this run. None: a new one.
        display: shows the progress. None: on standard error.
        page: serve the live page during the run.

    Returns:
        The content of `report.json`; its `exit_code` is 0 (done), 1 (failed), or 4 (audit failed or records lost).

    Raises:
        ConfigError: the job cannot be run this way, or its topics contain an earlier run.
        ServiceUnavailableError: Kafka or Redis cannot be found or started.
    """
    check_runnable(config)
    _check_topics(config, runs_folder, fresh=fresh)
    folder = folder or create(runs_folder, config.job, datetime.now())
    config = _resolved(config, folder)
    with folder.locked():
        folder.write_job(config)
        return run_in(folder, config, hook=hook, fresh=fresh, display=display, page=page)


def run_in(
    folder: RunFolder,
    config: JobConfig,
    *,
    hook: MakeHook | None = None,
    fresh: bool = False,
    display: Display | None = None,
    page: bool = False,
) -> dict[str, Any]:
    """Run the job in a folder with its resolved job file, from its checkpoints if it has any; return the report."""
    follower: RunFollower | None = None
    with Interrupts() as interrupts, display or make_display(config.stop) as display:
        display.say(f"job {config.job}: run folder {display_path(folder.path)}")
        display.say(step_text(config))
        if (advised := advice(config)) is not None:
            display.say(advised)
        if hook is not None:
            accompanied_by = hook(folder, display)
        else:
            accompanied_by = ActorWorkers() if isinstance(config.fleet, RayFleetConfig) else RunHook()
        try:
            with (
                _services_of(config, folder, display, interrupts, accompanied_by, fresh=fresh) as run,
                Tail(config, run.stack.services, (config.topic("updates"), config.topic("metrics"))) as records,
            ):
                follower = RunFollower(run, records)
                shown = start_page(run) if page else None
                outcome = _learn(run, follower)
                follower.read_to_end()
                outcome.restarts, outcome.extra = dict(follower.restarts), run.hook.report_fields()
                outcome.files = {name: display_path(path) for name, path in run.hook.files().items()}
                report = finish_run(run, follower.model, outcome)
                if shown is not None:
                    end_page(shown)
                return report
        except KeyboardInterrupt:  # stopped immediately: all processes of the run have been killed
            if follower is not None:
                display.say(_what_is_lost(folder, follower.model))
            raise


def check_runnable(config: JobConfig, *, begins: bool = True) -> None:
    """Check everything that can be checked before a process is started.

    Raises:
        ConfigError: the job cannot be run this way.
    """
    if isinstance(config.source, StdinSource) and sys.stdin.isatty():
        raise ConfigError("source.kind: stdin: expected a pipe, got a terminal; as in: my-events | doll up JOB.yaml")
    if isinstance(config.source, FeedSource):
        check_program(config.path(config.source.socket))
    if config.data.join is not None:
        require("data.join", "join")
        if kafka_address(config) is None:
            raise ConfigError(
                f"data.join: set kafka.address, or {KAFKA_ENV}, to the Kafka that has topic "
                f"{config.data.join.features.topic}: one that doll up starts has no topics"
            )
    if config.data.topic is not None and kafka_address(config) is None:
        raise ConfigError(
            f"data.topic is {config.data.topic}: set kafka.address, or {KAFKA_ENV}, to the Kafka that has it: one that "
            "doll up starts has no topics"
        )
    if isinstance(config.fleet, RayFleetConfig):
        check_actors(config)
    check_files(config)
    check_recipe(config)
    if begins and config.training.init_from is not None:
        find_source(config, config.training.init_from.source)
    check_task(config)
    check_devices(config)
    check_pipeline(config)


@contextlib.contextmanager
def _services_of(
    config: JobConfig, folder: RunFolder, display: Display, interrupts: Interrupts, hook: RunHook, *, fresh: bool
) -> Iterator[LocalRun]:
    """Perform the second and third effect; all started services end at the exit of the context."""
    say = display.say
    with _logging_to(folder.logs / "up.log", config.log.format), ForkServer(folder.logs / "forkserver.log") as forks:
        say("loading torch and building the model")
        if begun := _check_model(folder, forks):
            say(begun)
        if config.ps.shards == "auto":
            config = config.with_shards(load(folder.job).ps.num_shards)  # written by the process that built the model
            say(f"ps.shards: auto is {config.ps.num_shards} for this model")
        say("connecting to Kafka and Redis")
        with local_stack(config, folder.path, say, advertised_ports=hook.advertised_ports) as stack:
            if (taken := taken_health_ports(config)) is not None:
                say(f"warning: {taken}")
            store, place = open_store(config, folder.path), checkpoint_location(config, folder.path)
            recorded = recorded_partitions(store)
            if config.data.topic is not None:
                config = with_partitions(config, stack.services, recorded=recorded, begins=recorded is None)
                folder.write_job(config)
            for warning in topics.ensure(config, stack.services, begins=recorded is None):
                say(f"warning: {warning}")
            seen = admit(config, stack.services, store, place, ANY_TERM if fresh else 0)
            after_term = seen.newest_term if fresh else 0
            if after_term:
                say(f"a new generation on the topics of an earlier run ({seen}), from data.start: {config.data.start}")
            kinds = {"kafka_kind": stack.kafka_kind, "redis_kind": stack.redis_kind, "notes": stack.notes}
            folder.write_stack(stack.services, **kinds)
            yield LocalRun(config, folder, display, interrupts, hook, forks, stack, after_term, seen.newest_term)


def _learn(run: LocalRun, follower: RunFollower) -> RunOutcome:
    """Run the roles to their end; return the reason, the seconds of learning, error and exit code."""
    stack, place = run.stack, display_path(run.folder.path)
    learning = Learning(run, follower)
    run.interrupts.graceful = True
    outcome = RunOutcome("", 0, 0.0, started_at_s=time.time(), kafka_kind=stack.kafka_kind, redis_kind=stack.redis_kind)
    outcome.notes = tuple(stack.notes)
    started_s = time.monotonic()
    try:
        learning.start_roles()
        outcome.reason = learning.follow()
        run.hook.close()
        outcome.seconds = time.monotonic() - started_s
        stop = run.config.stop.model_dump(exclude_none=True)
        if outcome.reason == SOURCE_ENDED and stop:
            outcome.error, outcome.exit_code = ended_early(stop, follower.failures), 1
        learning.shut_down()
        if outcome.reason == SOURCE_ENDED and not follower.model.history.samples_total and follower.unlearned():
            outcome.error = outcome.error or f"the source has ended, and nothing was learned of it; see {place}/logs"
            outcome.exit_code = 1
    except (DollError, OSError) as error:
        problem = error if isinstance(error, DollError) else unwritable(error)
        if is_full(run.folder.path):  # the message of a broker would be a long Java trace
            problem = ServiceUnavailableError(
                f"no space is left on the disk of {place}: free some, then: doll resume {place}"
            )
        if problem.exit_code == BadStreamError.exit_code:
            follower.read_to_end()  # the parameter server's exit code may be seen before its last record
        if not follower.job_error:
            run.display.say(f"failed: {problem}")
            outcome.reason, outcome.error, outcome.exit_code = "failed", str(problem), problem.exit_code
        outcome.seconds = outcome.seconds or time.monotonic() - started_s
    run.hook.close()
    learning.stop()
    dead, refused = follower.model.dead_letters(), follower.job_error
    if not refused and dead.letters and not follower.model.history.samples_total:
        refused = f"not one sample was usable: {dead.text()}"
    refused = refused and follower.model.explained(refused)
    outcome.error = outcome.error and follower.model.explained(outcome.error)
    if refused:
        outcome.error = f"{refused}. All of them: doll dead list {place}"
        outcome.exit_code = BadStreamError.exit_code
        outcome.reason = outcome.reason if outcome.reason != "failed" else "bad records"
    return outcome


def _what_is_lost(folder: RunFolder, model: ProgressModel) -> str:
    state = model.snapshot(time.monotonic())
    durable = state.durable_version or 0
    lost = ""
    if state.version > durable:
        lost = f"; updates {durable + 1} to {state.version} are lost, and their samples are learned again"
    return (
        f"stopped at once: there is no audit, model or report. Version {durable} is saved: "
        f"doll resume {display_path(folder.path)} goes on from it{lost}"
    )


def _resolved(config: JobConfig, run: RunFolder) -> JobConfig:
    """Return `config` with absolute folders and files."""
    place = checkpoint_location(config, run.path)
    checkpoint = config.checkpoint.model_copy(update={"folder": place.resolve() if isinstance(place, Path) else place})
    training = config.training
    if training.init_from is not None:
        path, version = find_source(config, training.init_from.source)
        source = f"{path}" if version is None else f"{path}@{version}"
        training = training.model_copy(update={"init_from": training.init_from.model_copy(update={"source": source})})
    base = config.base_folder.resolve()
    resolved = {"checkpoint": checkpoint, "training": training, "base_folder": base}
    if isinstance(config.fleet, RayFleetConfig):
        # Makes the names of actors unique; actors cannot use a folder in this machine's shared memory.
        cluster = config.fleet.cluster or cluster_of(run.path)
        resolved |= {
            "fleet": config.fleet.model_copy(update={"cluster": cluster}),
            "blobs": config.blobs.model_copy(update={"kind": "redis"}),
        }
    return config.model_copy(update=resolved)


def _check_model(run: RunFolder, forks: ForkServer) -> str:
    """Build the model once, in a separate process, so that a mistake in it is found before a service is started. Return
    a description of the given weights with which the job begins; "" if there are none.

    Raises:
        ConfigError: the task or its model cannot be used.
    """
    log_path = run.logs / "model.log"
    has_begun = run.init_from.exists()  # from an earlier session: this run continues
    role = forks.start_role(
        "doll.run.local.roles:model_role", [str(run.job), str(run.path)], log_path=log_path, name="model"
    )
    if (code := role.wait()) != 0:
        said = [line.removeprefix("doll: ") for line in tail(log_path).splitlines() if line.startswith("doll: ")]
        problem = said[-1] if said else f"the model cannot be built: {describe_exit(code or 0)}"
        raise ConfigError(f"{problem}; the traceback is in {display_path(log_path)}")
    begins = run.init_from.exists() and not has_begun
    return str(read_json(run.init_from)["text"]) if begins else ""


def _check_topics(config: JobConfig, runs_folder: Path, *, fresh: bool) -> None:
    """Check that a new run of the job may begin on the given broker, if there is one.

    Raises:
        ConfigError: the broker has the topics of an earlier run. With `fresh`: that run is still running, or its
            checkpoints exist.
        CheckpointError: the checkpoint store cannot be read.
        ServiceUnavailableError: Kafka stops answering.
    """
    address = kafka_address(config)
    services = Services(address or "", "")
    if address is None or kafka_problem(config, services, _REACHABLE_S) is not None:
        return  # `local_stack` reports the problem, or starts a broker
    given = config.checkpoint.folder is not None  # otherwise the new run folder, which has no checkpoints
    store, place = open_store(config, runs_folder), checkpoint_location(config, runs_folder)
    if config.data.asks_kafka:
        config = with_partitions(config, services, recorded=recorded_partitions(store) if given else None)
    existing = store.versions() if given else []
    if existing and not fresh:
        admit(config, services, store, place, 0)  # the run resumes from them
        return
    if existing:
        raise ConfigError(
            f"--fresh: {place} has {len(existing)} checkpoints of job {config.job}: expected none; set another "
            "checkpoint.folder, move them away, or resume from them without --fresh"
        )
    seen = read_lineage(config, services)
    if not fresh:
        resume = _newest_run(runs_folder, config.job, address)
        refuse_earlier_run(
            config, services, seen, 0, place if given else "the folder of a new run", resume=resume or "RUN"
        )
    elif seen.newest_term and not seen.finished:
        try:
            with LeaderCheck(config, services) as leader_check:
                leader_check.require_no_leader(lambda: False)
        except FencedError as exc:
            raise ConfigError(
                f"--fresh: the earlier run of job {config.job} on Kafka at {address} is still running ({seen}): stop "
                f"it first, or use another name (--set job={config.job}-2)"
            ) from exc


def _newest_run(runs_folder: Path, job: str, kafka: str) -> str:
    """Return the newest run of this job on this broker that has checkpoints; "" if there is none."""
    for path in sorted(runs_folder.glob(f"{job}-*/{STACK}"), key=lambda path: path.stat().st_mtime, reverse=True):
        with contextlib.suppress(Exception):  # any folder may have such a name
            if read_json(path)["kafka"] == kafka:
                config = load(path.parent / JOB)
                if config.job == job and open_store(config, path.parent).versions():
                    return str(path.parent)
    return ""


class _Log(io.TextIOWrapper):
    """A log that ignores errors of a full disk, so that the run continues to its report. `raw` is not buffered."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.buffer.write(text.encode("utf-8", "replace"))
        return len(text)


@contextlib.contextmanager
def _logging_to(path: Path, log_format: telemetry.LogFormat) -> Iterator[None]:
    """Write the log of this process to a file, because log lines on the terminal would damage the live display."""
    with _Log(cast(BinaryIO, path.open("ab", buffering=0))) as file:
        telemetry.configure(log_format, process="up", stream=file)
        try:
            yield
        finally:
            telemetry.configure(log_format, process="up")
