"""`doll worker`: one worker process, from joining the job to its end."""

from __future__ import annotations

import math
import os
import signal
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import torch

from doll.config import JobConfig
from doll.config.fingerprint import difference
from doll.consumers.channels.control_link import ControlLink
from doll.consumers.channels.kafka_channel import JobEndedError, WorkerChannel
from doll.consumers.compute.batch_sets import SetContribution
from doll.consumers.compute.compressor import Compressor, DenseCompressor, SparseCompressor
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.compute.gradient_engine import GradientEngine, ThreadGradientEngine
from doll.consumers.compute.grant_handler import GrantHandler
from doll.consumers.compute.guard import Guard
from doll.consumers.compute.local_model import CachedVersion
from doll.consumers.compute.step_model import StepModel
from doll.consumers.compute.task_steps import OwnSteps
from doll.consumers.faust_app import FaustStream
from doll.consumers.intake.dead_letters import DeadLetters
from doll.consumers.intake.decoder import ThreadDecoder
from doll.consumers.lifecycle.departure import Departure
from doll.consumers.lifecycle.spot_notices import watch_spot_notices
from doll.consumers.pipeline.pipeline_engine import PipelineGradientEngine
from doll.consumers.pipeline.stage_processes import StageProcesses, start_stages
from doll.consumers.pipeline.task_log import TaskLog
from doll.consumers.protocol.worker_core import WorkerCore
from doll.consumers.runtime import WorkerRuntime
from doll.consumers.tables.row_client import RowClient
from doll.consumers.tables.table_rows import TableRows
from doll.errors import ConfigError, FencedError
from doll.kafka import topics
from doll.kafka.chunk_reader import Learned
from doll.kafka.samples_topic import bounds_reaching, refuse_replaced_topic
from doll.ledger.admission import AFTER_TERM_ENV
from doll.model.flat_model import FlatModel, build, fingerprint
from doll.optim.row_optimizer import row_optimizer
from doll.pipeline.planner.cut import check_with_samples, cut
from doll.pipeline.profiling.layers import Layer
from doll.process.health import Heartbeat, heartbeat_of
from doll.process.memory import keep_freed_memory
from doll.records.control import NewVersion
from doll.service_checks import require_services
from doll.services import Services
from doll.storage.blobs import Blobs, scope_of
from doll.storage.stores import open_blobs
from doll.task.base import Task, load_task
from doll.telemetry import get_logger

log = get_logger(__name__)

INSTANCE_ENV: Final = "DOLL_INSTANCE"
INCARNATION_ENV: Final = "DOLL_INCARNATION"
MARKET_ENV: Final = "DOLL_MARKET"
BOOT_ENV: Final = "DOLL_BOOT_DELAY_S"


def run_worker(
    config: JobConfig, services: Services, worker: int, run_folder: Path, *, departure: Departure | None = None
) -> int:
    """Work as worker `worker`.

    Args:
        departure: when this process must leave; SIGTERM (`worker.drain_s`) and a spot notice (`worker.spot_notices`)
            set it too.

    Returns:
        0 when the job has ended, the process had to leave or another one has its place; 1: start it again.

    Raises:
        DollError: services do not answer, the task does not load, or the parameter server runs another job file.
    """
    departure = departure or Departure()
    keep_freed_memory()
    torch.set_num_threads(config.worker.torch_threads)
    if not 0 <= worker < config.data.workers:
        raise ConfigError(
            f"--worker: expected 0 to {config.data.workers - 1} (data.workers is {config.data.workers}), got {worker}"
        )
    if config.worker.pipeline is not None:
        return _run_virtual_worker(config, services, worker, run_folder, departure)
    with heartbeat_of(f"worker-{worker}", config) as heartbeat, watch_spot_notices(config, departure):
        return _run(config, services, worker, run_folder, departure, heartbeat)


def _run_virtual_worker(
    config: JobConfig, services: Services, worker: int, run_folder: Path, departure: Departure
) -> int:
    """The stages are forked first, while this process has one thread and no connection."""
    task = load_task(config)
    model = build(config, task, with_rows=False)
    parts = cut(config, task, model.module, worker)
    stages = start_stages(
        config, task, model, parts, worker, in_flight=config.training.policy.batches_per_push
    )  # fmt: skip
    try:
        with heartbeat_of(f"worker-{worker}", config) as heartbeat, watch_spot_notices(config, departure):
            return _run(
                config, services, worker, run_folder, departure, heartbeat, Prepared(task, model, parts, stages)
            )
    finally:
        stages.close()


class Prepared(NamedTuple):
    """What was made before the worker's threads."""

    task: Task
    model: FlatModel
    parts: list[list[Layer]]
    stages: StageProcesses


def _run(
    config: JobConfig, services: Services, worker: int, run_folder: Path, departure: Departure, heartbeat: Heartbeat,
    prepared: Prepared | None = None,
) -> int:  # fmt: skip
    booted_s = time.monotonic() + _env_number(BOOT_ENV)
    # Until Faust takes the signals over.
    signal.signal(signal.SIGTERM, lambda *_: departure.leave_within(config.worker.drain_s, "sigterm"))
    require_services(config, services)
    topics.check(config, services)
    task = load_task(config) if prepared is None else prepared.task
    model = build(config, task, with_rows=False) if prepared is None else prepared.model
    own_fingerprint = fingerprint(config, model)
    channel = WorkerChannel(config, services, worker)
    _wait_for_boot(booted_s, departure)
    heartbeat.set_waiting_for("the parameter server's answer")
    try:
        joined = channel.join(process_name(), departure, incarnation(), after_term=int(_env_number(AFTER_TERM_ENV)))
    except JobEndedError as exc:
        log.info("job_ended", reason=str(exc), hint="to continue it, start `doll ps` first")
        return 0
    except FencedError as exc:
        # Not a failure: a supervisor (compose, systemd, ours) that restarts what fails must not start this one again.
        log.info("fenced", reason=str(exc))
        return 0
    if joined is None:
        return 0
    welcome, commands_offset = joined
    if welcome.fingerprint != own_fingerprint:
        raise ConfigError(
            f"the parameter server runs another job file: {difference(welcome.fingerprint, own_fingerprint)}"
        )
    start = welcome.origin + welcome.next_batch * config.data.records_per_batch
    learned = Learned(welcome.origin + welcome.included * config.data.records_per_batch, welcome.leader_epoch)
    samples = config.topic("samples")
    if welcome.samples_id:
        refuse_replaced_topic(samples, welcome.samples_id, topics.topic_id(config, services, "samples"))
    bounds_reaching(
        samples, worker, start, channel.watermarks
    )  # where the log begins behind it, the first fetch finds it
    log.info("joined", worker=worker, session=welcome.session, from_offset=start)
    blobs = open_blobs(config, services, give_up=departure)
    core = WorkerCore(
        welcome, max_pending=config.worker.max_pending_batches, now=time.monotonic(),
        market=os.environ.get(MARKET_ENV, ""), incarnation=incarnation(),
    )  # fmt: skip
    dead_letters = DeadLetters(config, task, channel, core.worker, term=lambda: core.term)
    decoder = ThreadDecoder(dead_letters.decode)
    scope = scope_of(config.job, welcome.run_id)
    row_client = None if model.tables is None else RowClient(config, blobs, model.tables.shapes, scope)
    engine: GradientEngine
    engine_ended = None
    if prepared is None:
        engine = _make_engine(
            config, task, model, blobs, dead_letters, worker, row_client, scope, channel.report_rows
        )  # fmt: skip
    else:
        computer = GradientComputer(task, model)
        engine = PipelineGradientEngine(
            config, prepared.stages, guard=Guard(config, task, computer), computer=computer,
            compressor=SparseCompressor(scope, model.num_parameters, {}), blobs=blobs, dead_letters=dead_letters,
            departure=departure, task_log=TaskLog(run_folder / "pipeline" / f"worker-{worker}.jsonl"),
            check=partial(check_with_samples, task, model.module, prepared.parts), scope=scope,
        )  # fmt: skip
        engine_ended = engine.ended
    link = None
    if config.control.kind != "kafka":
        link = ControlLink(services, config.control.kind, on_refused=channel.report_refused_endpoints)
        link.welcome(welcome)
    runtime = WorkerRuntime(
        config, core=core, channel=channel, decoder=decoder, engine=engine, commands_offset=commands_offset,
        departure=departure, heartbeat=heartbeat, link=link, row_client=row_client, engine_ended=engine_ended,
    )  # fmt: skip
    try:
        return FaustStream(config, services, runtime, run_folder / "faust" / f"worker-{worker}", learned).run()
    finally:
        decoder.close()
        engine.close()
        channel.close()


def _make_engine(
    config: JobConfig, task: Task, model: FlatModel, blobs: Blobs, dead_letters: DeadLetters, worker: int,
    row_client: RowClient | None, scope: str, report: Callable[[dict[str, float]], object],
) -> GradientEngine:  # fmt: skip
    rows = None
    if model.tables is not None and row_client is not None:
        rows = TableRows(
            scope, blobs, row_client, model.tables.shapes, config.worker.row_cache_bytes,
            optimizer=row_optimizer(config.training.optimizer) if config.training.policy.sends_steps else None,
            report=report,
        )  # fmt: skip
        model.tables.connect(rows.look_up)
    computer = GradientComputer(task, model)
    local_model: CachedVersion | StepModel
    contribution: SetContribution
    compressor: Compressor = DenseCompressor(scope)
    if config.training.policy.sends_steps or model.tables is not None:
        tables = {} if model.tables is None else model.tables.shapes
        compressor = SparseCompressor(scope, model.num_parameters, tables)
    if config.training.policy.sends_steps:
        local_model = contribution = StepModel(
            scope, blobs, config.training, model, computer, takes_steps=task.defines_step, rows=rows
        )
    else:
        local_model, contribution = CachedVersion(scope, blobs, computer), computer.new_sum()
    handler = GrantHandler(
        config,
        local_model=local_model,
        guard=OwnSteps(config, task, model, worker) if task.defines_step else Guard(config, task, computer),
        compressor=compressor,
        blobs=blobs,
        dead_letters=dead_letters,
        contribution=contribution,
        rows=rows,
        scope=scope,
    )

    def offer(weights: NewVersion) -> None:
        if rows is not None:
            rows.offer(weights)
        local_model.offer(weights)

    return ThreadGradientEngine(handler.handle, offer, handler.store_rest)


def process_name() -> str:
    """A name that no other process has; it begins with the name of its machine where that is given ($DOLL_INSTANCE)."""
    machine = os.environ.get(INSTANCE_ENV, "")
    return f"{machine}:{uuid.uuid4().hex}" if machine else uuid.uuid4().hex


def incarnation() -> int:
    """Number of this machine among those of its slot, from the provisioner; 0: they are not numbered.

    Raises:
        ConfigError: not a number of 0 or more.
    """
    return int(_env_number(INCARNATION_ENV))


def _env_number(name: str) -> float:
    """A number from the environment; 0 where it is not set."""
    given = os.environ.get(name, "") or "0"
    try:
        number = float(given)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise ConfigError(f"{name}: expected a number of 0 or more, got {given!r}")
    return number


def _wait_for_boot(booted_s: float, departure: Departure) -> None:
    """Wait until then: a local process that stands for a machine takes as long to boot as a real one."""
    while (left_s := booted_s - time.monotonic()) > 0 and not departure():
        time.sleep(min(left_s, 0.05))
