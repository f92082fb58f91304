"""`doll ps`: one parameter server process, from start to end of the job."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import uuid
from pathlib import Path

import msgspec
import torch

from doll.config import JobConfig, dump_run
from doll.errors import BadStreamError, CheckpointError
from doll.kafka import topics
from doll.kafka.foreign_topic import with_partitions
from doll.kafka.range_reader import RangeReader
from doll.kafka.reader import PrefetchedBounds
from doll.kafka.samples_topic import ReplacedSamplesError, deleted_before, describe_samples, start_offsets
from doll.kafka.topic_watch import TopicWatch
from doll.kafka.topics import cluster_id
from doll.ledger.admission import ANY_TERM, admit, new_run_id, read_lineage
from doll.ledger.lineage import Lineage
from doll.ledger.snapshot_counts import read_counts
from doll.model.flat_model import build, counted, fingerprint
from doll.model.initial_weights import WeightMatch
from doll.optim.recipe import check_recipe
from doll.process.fault_points import fault_point
from doll.process.health import Heartbeat, heartbeat_of
from doll.process.memory import keep_freed_memory
from doll.ps.channels.control_channel import ControlChannel, open_links
from doll.ps.channels.kafka_channel import KafkaChannel
from doll.ps.checkpointing import decode_snapshot
from doll.ps.engine.stopping import reached_before
from doll.ps.event_log import FileEventLog
from doll.ps.model.model_host import ModelHost
from doll.ps.model.updater import make_parts
from doll.ps.server import ParameterServer, Signals, deliver, require_newest_term, serve
from doll.ps.shards.pipes import PipeBrokenError
from doll.ps.shards.redis_pipes import RedisServerEnd
from doll.ps.shards.sharded_host import PartedStore, ShardedHost, ShardLostError
from doll.ps.standby import LeaderCheck, wait_for_lease
from doll.ps.start import Start, begun_with, make_engine, matched
from doll.records.control import Hello
from doll.service_checks import require_services
from doll.services import Services
from doll.storage.blobs import Blobs, scope_of
from doll.storage.checkpoints import Checkpoint, VersionStore
from doll.storage.redis_client import WorkerCount, connect_redis
from doll.storage.stores import checkpoint_location, open_blobs, open_store
from doll.task.base import load_task, source_checksum
from doll.telemetry import get_logger

log = get_logger(__name__)


def run_ps(
    config: JobConfig,
    services: Services,
    run_folder: Path,
    *,
    standby: bool = False,
    leader_check: LeaderCheck | None = None,
    fresh: bool = False,
    after_term: int = 0,
    run_id: str = "",
    check_only: bool = False,
) -> int:
    """Serve the job until its stop rule is met or until SIGTERM, and return the exit code 0.

    After SIGTERM, the server saves a checkpoint, and the job can be resumed. If the stop rule is already met at the
    start, the server returns 0 at once and writes nothing. Exception: a server that replaces another one (no
    `leader_check`, no `standby`) writes the end of the job again, for processes that wait for it.

    Args:
        standby: True: begin only after no other server has written anything for `ps.lease_s`.
        leader_check: check for another leader, which began at the start of this process. None: no check is needed, or
            this server replaces the other leader.
        fresh: True: begin a new generation if there is no checkpoint, or if the samples topic of the checkpoint was
            replaced.
        after_term: highest term of earlier runs on the same topics. If there is no checkpoint, a new generation may
            begin although the topics have records of terms up to this one.
        run_id: name of the run in shared keys and streams (docs/decisions/0045). "": use the run id of the checkpoint,
            or a new one.
        check_only: True: check that the job may be served, and return before anything is claimed.

    Raises:
        ConfigError: the topics and the checkpoints belong to different runs, or the stream was replaced.
        BadStreamError: too many records are refused (`data.on_bad_records`). The job has ended in order.
        DollError: services do not answer, the task cannot be loaded, the checkpoint is of another job or model, another
            server leads, a newer server has claimed the job, or the model diverged.
    """
    with heartbeat_of("ps-standby" if standby else "ps", config) as heartbeat:
        signals: Signals | None = None
        if config.ps.shards == "auto":
            config = counted(config, load_task(config))
        while True:
            launch = _Launch(config, services, run_folder, fresh=fresh, after_term=after_term, run_id=run_id)
            if check_only:
                launch.check()
                return 0
            signals = signals or Signals()
            try:
                return launch.run(heartbeat, leader_check, signals, standby=standby)
            except (ShardLostError, PipeBrokenError) as exc:
                # A supervisor would take the ends of this process for failures of its own.
                log.warning("term_ended", reason=str(exc), action="beginning again from the newest checkpoint")
                launch.require_leader()
                leader_check, standby = None, False


class _Launch:
    """The steps of one server from its job file to the end of the job. For the arguments see `run_ps`."""

    def __init__(
        self, config: JobConfig, services: Services, run_folder: Path, *, fresh: bool, after_term: int, run_id: str
    ) -> None:
        self._config, self._services, self._run_folder = config, services, run_folder
        self._fresh, self._after_term, self._run_id = fresh, after_term, run_id
        self._seen: Checkpoint | None = None  # the newest one before the claim

    def check(self) -> None:
        """Check that a server may serve the job. Raises the errors that `run` raises before it claims a term."""
        self._open()
        checkpoint = self._newest()
        if checkpoint is None or self._fresh:
            matched(self._config, self._model)
        self._admit()
        self._start(checkpoint)

    def require_leader(self) -> None:
        """Raise FencedError if another server has begun a term after the term of this one."""
        require_newest_term(self._store, self._term)

    def run(
        self, heartbeat: Heartbeat, leader_check: LeaderCheck | None, signals: Signals, *, standby: bool
    ) -> int:  # fmt: skip
        """Serve until the end, and return the exit code. Raises ShardLostError or PipeBrokenError after all that this
        method has opened is closed."""
        if self._config.ps.shards == 1:  # otherwise the memory of the model is to be returned
            keep_freed_memory()
        self._open()
        # These checks come before the claim: a wrong job file must not fence the server that runs.
        newest = self._seen = self._newest()
        replaces = not standby and leader_check is None
        if newest is not None and not (self._fresh or replaces) and (reason := self._finished(newest)) is not None:
            hint = "to continue it, change the section stop of the job file"
            log.info("job_finished", version=newest.version, reason=reason, hint=hint)
            return 0
        initial = matched(self._config, self._model) if newest is None or self._fresh else None
        if standby:
            heartbeat.set_waiting_for("the end of the leader's lease (standby)")
            if not wait_for_lease(self._config, self._services, lambda: signals.leave):
                return 0
        if leader_check is not None:
            heartbeat.set_waiting_for("the check for another leader")
            if not leader_check.require_no_leader(lambda: signals.leave):
                return 0
        return self._lead(self._admit(), initial, signals, heartbeat)

    def _open(self) -> None:
        """Wait for the services, then open the model, its fingerprint, the checkpoint store and the task's code."""
        config, services = self._config, self._services
        torch.set_num_threads(1)
        require_services(config, services)
        self._store = open_store(config, self._run_folder)
        topics.ensure(config, services, begins=not self._store.versions())
        topics.check(config, services)
        task = load_task(config)
        self._model = build(config, task, in_files=config.ps.shards != 1)  # its shards have the model
        check_recipe(config.training, self._model)
        self._fingerprint, self._code = fingerprint(config, self._model), source_checksum(task)
        self._table_shapes = {} if self._model.tables is None else self._model.tables.shapes

    def _newest(self) -> Checkpoint | None:
        """Return the newest checkpoint. If the model has shards, it has no tensors, unless an event log needs them."""
        is_whole = len(self._model.slices) == 1 or self._config.checkpoint.event_log
        checkpoint = self._store.load_newest(self._fingerprint, in_place=not is_whole, with_parts=is_whole)
        return checkpoint if checkpoint is None or is_whole else dataclasses.replace(checkpoint, tensors={})

    def _finished(self, newest: Checkpoint) -> str | None:
        """Return why the job of this checkpoint has ended, if its stop rule is met and all roles know of the end;
        otherwise None. After a rollback, a regrid or a new server, the checkpoint's newer term makes it None."""
        reason = reached_before(self._config.stop, decode_snapshot(newest))
        if reason is None:
            return None
        lineage = read_lineage(self._config, self._services, tail_only=True)
        is_told = (lineage.newest_term, lineage.version) == (newest.term, newest.version)
        return reason if is_told and lineage.finished and not lineage.error else None

    def _admit(self) -> Lineage:
        location = checkpoint_location(self._config, self._run_folder)
        after_term = ANY_TERM if self._fresh else self._after_term
        return admit(self._config, self._services, self._store, location, after_term)

    def _lead(self, lineage: Lineage, initial: WeightMatch | None, signals: Signals, heartbeat: Heartbeat) -> int:
        """Claim a term, and serve the job in this term."""
        config, services, model = self._config, self._services, self._model
        term = self._term = self._store.claim_term(lineage.newest_term)
        fault_point("ps.after_claim")
        checkpoint, self._seen = self._seen, None
        if checkpoint is None or self._store.versions()[-1:] != [(checkpoint.term, checkpoint.version)]:
            checkpoint = self._newest()  # after the claim no earlier server can add one
        kafka = KafkaChannel(config, services)

        def give_up() -> bool:
            heartbeat.beat("loop")  # the loop waits for Redis here; a restart of this process would not help
            return signals.leave

        blobs = open_blobs(config, services, give_up=give_up)
        start = self._start(checkpoint, term, generation=term if lineage.newest_term else 0)
        chain = b""
        if start.checkpoint:
            initial = None
            chain = checkpoint.chain if checkpoint is not None else b""
        if initial is not None:
            initial.load_into(model)
            log.info("initial_weights", **initial.report.to_dict())
        is_divided, place = len(model.slices) > 1, None
        if is_divided and checkpoint is not None and start.checkpoint:
            place = checkpoint.term, checkpoint.version
        parts = None if is_divided and not config.checkpoint.event_log else make_parts(config.training, model)
        if initial is not None:
            tensors = {} if parts is None else parts.tensors()
            start = begun_with(config, start, tensors, self._fingerprint, initial.report.source)
        host: ModelHost | ShardedHost
        store: VersionStore = self._store
        if is_divided:
            host = self._sharded_host(term, start.run_id, blobs, heartbeat)
            store = PartedStore(store, host)
        else:
            assert parts is not None, "a model that is not divided is in this process"
            host = ModelHost(config, term, parts.updater, blobs, parts.tables, run_id=start.run_id)
        engine = make_engine(config, start, host.load, self._fingerprint)
        layout, num_parameters = model.layout, model.num_parameters
        if is_divided:
            del self._model, model  # their shards have built it, and nothing here needs its memory
        event_log = None
        if config.checkpoint.event_log:
            logged = msgspec.structs.replace(start, job=dump_run(config, self._run_folder))
            event_log = FileEventLog(self._run_folder / "events" / f"ps-{term:06d}.log", logged)
        channel = ControlChannel(kafka, open_links(config, services, term, start.run_id))
        job = scope_of(config.job, cluster_id(config, services))
        worker_count = WorkerCount(connect_redis(services, timeout_s=1.0, retries=0), job)
        server = ParameterServer(
            config, engine=engine, host=host, store=store, outbox=channel, event_log=event_log,
            channel_report=channel.report, publish_workers=worker_count.set, layout=layout, code=self._code,
            chain=chain,
        )  # fmt: skip
        watch = None
        if engine.start.samples_id:
            watch = TopicWatch(
                config, services, engine.start.samples_id, signals.stop_for_the_topic, signals.note_partitions
            )  # fmt: skip
            watch.start()
        log.info("started", term=term, version=engine.version, policy=engine.policy.name, parameters=num_parameters)
        greets_at_s = time.monotonic() + config.ps.lease_s

        def leaves() -> bool:
            """Return whether this process is to end. A worker that waits takes the end of an earlier server for the end
            of the job, unless it hears of this one, whose shards may need minutes for a large model."""
            nonlocal greets_at_s
            if time.monotonic() >= greets_at_s:
                greets_at_s = math.inf
                for worker in range(config.data.places):
                    channel.send_command(worker, Hello(term=term))
            return signals.leave

        try:
            if isinstance(host, ShardedHost) and not host.begin(self._fingerprint, place, leaves):
                return 0
            server.open()
            heartbeat.expect("loop")
            heartbeat.expect("kafka", vital=False)
            heartbeat.set_waiting_for("")
            serve(server, channel, signals, config.ps.lease_s, heartbeat)
            heartbeat.set_waiting_for("the delivery of the last records")
            deliver(channel, signals, heartbeat)
        except ShardLostError:
            channel.send_status(server.status())  # says which shard it is, until the next term begins
            raise
        finally:
            if isinstance(host, ShardedHost):
                host.close()  # before the thread that waits for the parts of a checkpoint is joined
            for opened in (watch, server, channel, blobs, event_log):
                if opened is not None:
                    opened.close()
        if watch is not None and watch.problem is not None and engine.finished is None:
            raise watch.problem
        if engine.error:
            raise BadStreamError(
                f"{engine.error} (data.on_bad_records); doll dead list shows all of them. Correct the source, or the "
                "task and replay them (doll dead replay), then start the job again: it goes on after them"
            )
        return 0

    def _sharded_host(self, term: int, run_id: str, blobs: Blobs, heartbeat: Heartbeat) -> ShardedHost:
        config, services = self._config, self._services
        client, job = connect_redis(services, retries=0), scope_of(config.job, cluster_id(config, services))
        process = uuid.uuid4().hex
        ends = [RedisServerEnd(client, job, number, process) for number in range(len(self._model.slices))]

        checked_s = time.monotonic()

        def wait(waits_for: str) -> None:
            """A shard that has begun a term of a successor does not answer any more."""
            nonlocal checked_s
            heartbeat.beat("loop")
            heartbeat.set_waiting_for(waits_for)
            if time.monotonic() - checked_s > config.ps.lease_s:
                checked_s = time.monotonic()
                with contextlib.suppress(CheckpointError):
                    require_newest_term(self._store, term)

        return ShardedHost(
            config, term, self._model.slices, ends, blobs, run_id=run_id, process=process, wait=wait,
            keeps_gradients=config.checkpoint.event_log, tables=self._table_shapes,
        )  # fmt: skip

    def _start(self, checkpoint: Checkpoint | None, term: int = 0, generation: int = 0) -> Start:
        """Continue from the checkpoint, or begin `generation` at `data.start` if there is no checkpoint. If `fresh` is
        set, begin also if the samples topic was replaced, because the model cannot continue on another topic.

        Raises:
            ReplacedSamplesError: the samples topic is not the topic of the checkpoint.
        """
        config, services, now = self._config, self._services, time.monotonic()
        # This consumer is separate from the channel's consumer, in which each request would wait for the fetch of
        # events (0.5 s per partition).
        with RangeReader(config, services) as reader:

            def bounds_of(partitions: int) -> PrefetchedBounds:
                return PrefetchedBounds(reader.bounds, reader.bounds_of_partitions, range(partitions))

            if checkpoint is not None:
                counts = read_counts(config, checkpoint.state)
                bounds, ends = bounds_of(len(counts.read_until)), counts.read_until
                try:
                    samples = describe_samples(
                        config, services, bounds, expected_id=counts.samples_id, read_until=ends
                    )  # fmt: skip
                except ReplacedSamplesError as exc:
                    if not self._fresh:
                        raise
                    log.warning("checkpoints_left_behind", reason=str(exc).partition(";")[0])
                else:
                    log.info("resumed", version=checkpoint.version, from_term=checkpoint.term)
                    run_id = self._run_id or counts.run_id or new_run_id()
                    return Start.resume(term, now, checkpoint, samples.topic_id, run_id)
            config = with_partitions(config, services, begins=True)
            samples = describe_samples(config, services, bounds_of(config.data.num_partitions))
        origins = start_offsets(config, services, samples)
        if deleted := deleted_before(config, generation, origins):
            log.warning(
                "records_deleted_before_start", topic=samples.name, records=sum(deleted), first_offsets=list(deleted),
                hint="they were older than the topic's retention.ms, by the broker's clock, or by their own if "
                "message.timestamp.type is CreateTime; doll audit counts them",
            )  # fmt: skip
        if generation:
            start = str(config.data.start)
            log.warning("generation_started", generation=generation, data_start=start, origins=list(origins))
        run_id = self._run_id or new_run_id()
        return Start(term, now, origins, generation=generation, samples_id=samples.topic_id, run_id=run_id)
