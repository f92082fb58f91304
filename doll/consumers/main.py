"""`doll worker`: one process of a worker, from joining the job to its end."""

from __future__ import annotations

import math
import os
import signal
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import torch

from doll.config import JobConfig
from doll.config.fingerprint import difference
from doll.consumers.channels.control_link import ControlLink
from doll.consumers.channels.kafka_channel import JobEndedError, WorkerChannel
from doll.consumers.compute.error_feedback import ErrorFeedback, rounded_before
from doll.consumers.compute.gradient import CachedVersion, ForwardPasses, GradientComputer
from doll.consumers.compute.gradient_engine import (
    BatchComputer,
    GradientEngine,
    GrantHandler,
    SetContribution,
    ThreadGradientEngine,
)
from doll.consumers.compute.guard import Guard
from doll.consumers.compute.shared_samples import SharedSamples
from doll.consumers.compute.step_model import StepModel
from doll.consumers.compute.task_steps import OwnSteps
from doll.consumers.compute.weights_ahead import SlicedDeltaReader
from doll.consumers.faust_app import DollApp, make_app, run_faust
from doll.consumers.intake.batching import stream_buffer_records
from doll.consumers.intake.dead_letters import DeadLetters, Decoder
from doll.consumers.lifecycle.departure import Departure
from doll.consumers.lifecycle.handover import wait_for_place
from doll.consumers.lifecycle.spot_notices import watch_spot_notices
from doll.consumers.pipeline.pipeline_engine import PipelineGradientEngine
from doll.consumers.pipeline.remote_stages import RemoteStages, gather
from doll.consumers.pipeline.stage_processes import StageProcesses, cut_model, is_limited, start_stages
from doll.consumers.protocol.worker_core import WorkerCore
from doll.consumers.runtime import WorkerRuntime
from doll.consumers.tables.row_client import RowClient
from doll.consumers.tables.table_rows import WorkerTables
from doll.errors import ConfigError, FencedError
from doll.kafka import topics
from doll.kafka.chunk_reader import ChunkReader
from doll.kafka.reader import PrefetchedBounds
from doll.kafka.samples_topic import bounds_reaching, refuse_replaced_topic
from doll.ledger.admission import AFTER_TERM_ENV, ENDED_TERM_ENV
from doll.model.devices import resolve
from doll.model.flat_model import FlatModel, build, fingerprint
from doll.model.random_numbers import draw_from
from doll.optim.row_optimizer import row_optimizers
from doll.pipeline.planner.cut import check_with_samples
from doll.pipeline.planner.measured import TaskLog
from doll.pipeline.profiling.layers import Layer
from doll.process.data_limit import DataLimit, out_of_memory
from doll.process.health import heartbeat_of
from doll.process.memory import keep_freed_memory, return_freed_memory
from doll.process.metric_names import CONTROL_REFUSED_TOTAL
from doll.process.signals import on_signal
from doll.records.bounds import Bounds, Cuts
from doll.records.control import Welcome
from doll.service_checks import require_services
from doll.services import Services
from doll.storage.blobs import Blobs, scope_of
from doll.storage.contributions import Compressor
from doll.storage.stores import open_blobs
from doll.task.base import Task, load_task
from doll.task.event_clock import event_clock
from doll.task.holdout import Split
from doll.telemetry import get_logger

log = get_logger(__name__)

INSTANCE_ENV: Final = "DOLL_INSTANCE"
INCARNATION_ENV: Final = "DOLL_INCARNATION"
MARKET_ENV: Final = "DOLL_MARKET"
BOOT_ENV: Final = "DOLL_BOOT_DELAY_S"


def run_worker(
    config: JobConfig, services: Services, worker: int, run_folder: Path, *, departure: Departure | None = None
) -> int:
    """Work as worker number `worker`.

    Args:
        departure: object that states when this process must leave. SIGTERM (`worker.drain_s`) and a spot notice
            (`worker.spot_notices`) also set it.

    Returns:
        0: the job has ended, the process had to leave, or another process has replaced it. 1: start this process again.

    Raises:
        DollError: services do not answer, the task cannot be loaded, or the parameter server runs another job file.
    """
    torch.set_num_threads(config.worker.torch_threads)
    if not 0 <= worker < (places := config.data.places):
        raise ConfigError(f"--worker: expected 0 to {places - 1} (data.max_workers is {places}), got {worker}")
    (return_freed_memory if is_limited(config, worker) else keep_freed_memory)()
    limit = DataLimit(config.worker.memory_bytes)
    limit.begin()
    try:
        return _WorkerProcess(config, services, worker, run_folder, departure or Departure(), limit).run()
    except Exception as exc:
        if (problem := out_of_memory(exc, config.worker.memory_bytes)) is not None:
            raise problem from exc
        raise


class Stages(NamedTuple):
    """The stages of a virtual worker, and the objects that they were created from."""

    task: Task
    model: FlatModel
    parts: list[list[Layer]]
    processes: StageProcesses | RemoteStages

    @classmethod
    def start(cls, config: JobConfig, worker: int) -> Stages:
        """Fork the stages of one worker."""
        task, model, parts = cut_model(config, worker)
        in_flight = config.training.policy.batches_per_push
        return cls(task, model, parts, start_stages(config, task, model, parts, worker, in_flight=in_flight))


class _WorkerProcess:
    """One process of a worker. It joins the job, then connects stream, protocol, decoder and engine."""

    def __init__(
        self, config: JobConfig, services: Services, worker: int, run_folder: Path, departure: Departure,
        limit: DataLimit,
    ) -> None:  # fmt: skip
        self._config, self._services = config, services
        self._worker = worker
        self._run_folder = run_folder
        self._departure, self._limit = departure, limit

    def run(self) -> int:
        """Work until the end of the job. Return the exit code, as `run_worker` does."""
        config = self._config
        self._stages: Stages | None = None
        pipeline = config.worker.pipeline
        if pipeline is not None and not pipeline.remote:
            # Forked first, while this process has one thread and no connection.
            self._stages = Stages.start(config, self._worker)
        try:
            with (
                heartbeat_of(f"worker-{self._worker}", config) as self._heartbeat,
                watch_spot_notices(config, self._departure),
            ):
                booted_s = time.monotonic() + _env_number(BOOT_ENV)
                # Until Faust handles the signals.
                on_signal(signal.SIGTERM, lambda: self._departure.leave_within(config.worker.drain_s, "sigterm"))
                with self._limit.lifted():
                    require_services(config, self._services)
                    topics.check(config, self._services)
                if pipeline is not None and pipeline.remote and not self._gather():
                    return 0
                self._prepare(self._stages)
                _wait_for_boot(booted_s, self._departure)
                wait_for_place(config, self._services, self._worker, incarnation(), gives_up=self._departure)
                return self._join_and_work()
        finally:
            if self._stages is not None:
                self._stages.processes.close()

    def _gather(self) -> bool:
        """Form a gang of stages on other machines. Return False if this process must not work."""
        config, worker = self._config, self._worker
        task, model, parts = cut_model(config, worker)
        with self._limit.lifted():
            processes = gather(
                config, self._services, worker, model, parts, give_up=self._departure,
                waiting_for=self._heartbeat.set_waiting_for,
            )  # fmt: skip
        self._stages = None if processes is None else Stages(task, model, parts, processes)
        return processes is not None

    def _prepare(self, stages: Stages | None) -> None:
        """Create the task, its model, the gradient computer, and a channel to Kafka."""
        config = self._config
        if stages is None:
            self._task = load_task(config)
            device = resolve(config.worker.device, self._worker)
            self._model = build(config, self._task, with_rows=False, device=device)
        else:
            self._task, self._model = stages.task, stages.model
        with self._limit.lifted():
            module, device = self._model.module, self._model.device
            draw_from(int.from_bytes(os.urandom(7)), device)  # random numbers of `decode`; `build` has set the seed
            passes = ForwardPasses(module, device, config.training.precision, compiles=config.worker.compile)
            self._computer = GradientComputer(self._task, self._model, passes)
            self._fingerprint = fingerprint(config, self._model)
            self._channel = WorkerChannel(config, self._services, self._worker)

    def _join_and_work(self) -> int:
        try:
            # Before the worker joins, because partitions wait for it from then on.
            app = make_app(
                self._config, self._services, self._worker, self._run_folder / "faust" / f"worker-{self._worker}"
            )
            with self._limit.lifted():
                joined = self._join()
            return 0 if joined is None else self._work(app, *joined)
        finally:
            self._channel.close()

    def _join(self) -> tuple[Welcome, int] | None:
        """Return the server's Welcome and the offset of the first command after the Welcome. Return None if this
        process must not work."""
        config, channel = self._config, self._channel
        self._heartbeat.set_waiting_for("the parameter server's answer")
        try:
            after_term = int(max(_env_number(AFTER_TERM_ENV), _env_number(ENDED_TERM_ENV)))
            joined = channel.join(process_name(), self._departure, incarnation(), after_term=after_term)
        except JobEndedError as exc:
            log.info("job_ended", reason=str(exc), hint="to continue it, start `doll ps` first")
            return None
        except FencedError as exc:
            # Not a failure: a supervisor (compose, systemd, ours) that restarts failed processes must not restart it.
            log.info("fenced", reason=str(exc))
            return None
        if joined is None:
            return None
        welcome, _ = joined
        if welcome.fingerprint != self._fingerprint:
            raise ConfigError(
                f"the parameter server runs another job file: {difference(welcome.fingerprint, self._fingerprint)}"
            )
        samples = config.topic("samples")
        if welcome.samples_id:
            refuse_replaced_topic(samples, welcome.samples_id, topics.topic_id(config, self._services, "samples"))
        size = config.data.records_per_batch
        starts = {
            item.partition: Bounds(item.origin, size, Cuts(item.left_out)).lo(item.next_batch)
            for item in welcome.served
        }
        bounds_of = PrefetchedBounds(channel.watermarks, channel.bounds_of_partitions, list(starts))
        for partition, start in starts.items():
            # If the log begins after `start`, the first fetch detects it.
            bounds_reaching(samples, partition, start, bounds_of)
        log.info("joined", worker=self._worker, session=welcome.session, from_offsets=starts)
        if not starts:
            log.info("spare", worker=self._worker, hint="other workers serve all partitions; `doll scale` changes that")
        return joined

    def _work(self, app: DollApp, welcome: Welcome, commands_offset: int) -> int:
        config, services, channel = self._config, self._services, self._channel
        with self._limit.lifted():
            blobs = open_blobs(config, services, give_up=self._departure)
        core = WorkerCore(
            welcome, max_pending=config.worker.max_pending_batches, now=time.monotonic(),
            market=os.environ.get(MARKET_ENV, ""), incarnation=incarnation(),
        )  # fmt: skip
        dead_letters = DeadLetters(config, self._task, channel, core.worker, term=lambda: core.term)
        decoder = Decoder(dead_letters.decode)
        scope = scope_of(config.job, welcome.run_id)
        tables = self._model.tables
        row_client = None if tables is None else RowClient(config, blobs, tables.shapes, scope, self._model.slices)
        engine: GradientEngine
        if self._stages is None:
            engine = self._thread_engine(blobs, dead_letters, row_client, scope, welcome.usual)
        else:
            engine = self._pipeline_engine(self._stages, blobs, dead_letters, scope, welcome.usual)
        runtime = WorkerRuntime(
            config, core=core, channel=channel, reader=self._reader(), decoder=decoder, engine=engine,
            commands_offset=commands_offset, departure=self._departure, heartbeat=self._heartbeat,
            link=self._link(welcome), row_client=row_client,
        )  # fmt: skip
        try:
            return run_faust(app, runtime, config.worker.drain_s)
        finally:
            decoder.close()
            engine.close()

    def _reader(self) -> ChunkReader:
        config = self._config
        return ChunkReader(
            config, self._services, config.topic("samples"), (), group=f"doll-{config.job}-w{self._worker}",
            max_chunk_records=max(1, stream_buffer_records(config) // 2),
            with_envelopes=self._task.reads_envelopes or Split.of_job(config) is not None,
            times_of=event_clock(config.freshness.time),
        )  # fmt: skip

    def _link(self, welcome: Welcome) -> ControlLink | None:
        if self._config.control.kind == "kafka":
            return None

        def report_refused(count: int) -> None:
            self._channel.report({CONTROL_REFUSED_TOTAL: float(count)})

        link = ControlLink(self._services, self._config.control.kind, on_refused=report_refused)
        link.welcome(welcome)
        return link

    def _pipeline_engine(
        self, stages: Stages, blobs: Blobs, dead_letters: DeadLetters, scope: str, usual: Sequence[float]
    ) -> PipelineGradientEngine:
        config, model = self._config, self._model
        # Finding the values that are not zero takes three times their memory.
        sparse_below = None if is_limited(config, self._worker) else model.num_parameters
        return PipelineGradientEngine(
            config, stages.processes, guard=Guard(config, self._task, self._computer, usual),
            computer=self._computer,
            compressor=Compressor(scope, sparse_below), blobs=blobs, dead_letters=dead_letters,
            departure=self._departure, task_log=TaskLog(self._run_folder / "pipeline" / f"worker-{self._worker}.jsonl"),
            check=partial(check_with_samples, self._task, model.module, stages.parts), task=self._task, scope=scope,
        )  # fmt: skip

    def _thread_engine(
        self, blobs: Blobs, dead_letters: DeadLetters, row_client: RowClient | None, scope: str,
        usual: Sequence[float],
    ) -> ThreadGradientEngine:  # fmt: skip
        config, task, model, computer = self._config, self._task, self._model, self._computer
        policy, form = config.training.policy, config.blobs.contributions
        sends_steps, rounds = policy.sends_steps, policy.holds_back and form == "bf16"
        rows = None
        if model.tables is not None and row_client is not None:
            steps_rows = sends_steps and not task.defines_step
            rows = WorkerTables(
                row_client, config.worker.row_cache_bytes,
                max_rows={name: bounds.max_rows for name, bounds in model.tables.bounds.items()},
                optimizers=row_optimizers(config.training, row_client.tables) if steps_rows else None,
                threshold=policy.filter_threshold, rounds=rounds, report=self._channel.report,
            )  # fmt: skip
            model.tables.connect(rows.look_up)
        compressor = Compressor(scope)
        if sends_steps or model.tables is not None or form != "float32":
            tables = {} if model.tables is None else model.tables.shapes
            rounding = None if form == "float32" else rounded_before if rounds else ErrorFeedback(form).round
            compressor = Compressor(scope, model.num_parameters, tables, rounding)
        deltas = None
        if policy.publishes_deltas:
            deltas = SlicedDeltaReader(scope, blobs, model.slices)
        local_model: CachedVersion | StepModel
        contribution: SetContribution
        background = ThreadPoolExecutor(1, thread_name_prefix="weights")  # its thread starts with the first offer
        if sends_steps:
            local_model = contribution = StepModel(
                scope, blobs, config.training, model, computer, takes_steps=task.defines_step, rows=rows,
                background=background, deltas=deltas, rounds=rounds,
            )  # fmt: skip
        else:
            local_model, contribution = CachedVersion(scope, blobs, computer, background, deltas), computer.new_sum()
        guard: BatchComputer = Guard(config, task, computer, usual)
        if task.defines_step:
            guard = OwnSteps(config, task, model)
        scale_in, differs = config.provision.scale_in, rounds or policy.filter_threshold > 0  # else replicas are equal
        is_compared = differs and scale_in.enabled and scale_in.evict == "worst_replica"
        handler = GrantHandler(
            config,
            local_model=local_model,
            guard=guard,
            compressor=compressor,
            blobs=blobs,
            dead_letters=dead_letters,
            contribution=contribution,
            rows=rows,
            shared=SharedSamples(config, task, computer) if is_compared else None,
            held_out=computer.score,
            scope=scope,
            slices=model.slices,
        )
        return ThreadGradientEngine(handler.handle, handler.offer, handler.store_rest, background)


def process_name() -> str:
    """Return a unique name for this process. It begins with the machine's name if $DOLL_INSTANCE is set."""
    machine = os.environ.get(INSTANCE_ENV, "")
    return f"{machine}:{uuid.uuid4().hex}" if machine else uuid.uuid4().hex


def incarnation() -> int:
    """Return the number that the provisioner gave to this machine among the machines of its slot; 0 if machines are not
    numbered. Raise ConfigError if the number is not valid."""
    return int(_env_number(INCARNATION_ENV))


def _env_number(name: str) -> float:
    """Return a number from the environment; 0 if the variable is not set."""
    given = os.environ.get(name, "") or "0"
    try:
        number = float(given)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise ConfigError(f"{name}: expected a number of 0 or more, got {given!r}")
    return number


def _wait_for_boot(booted_s: float, departure: Departure) -> None:
    """Wait until `booted_s`, to simulate the boot time of a real machine."""
    while (left_s := booted_s - time.monotonic()) > 0 and not departure():
        time.sleep(min(left_s, 0.05))
