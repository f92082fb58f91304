"""The parameter server without its transport. It connects the engine, the model host, the checkpoints and the outbox.

Order of effects, and the result of a crash after each step (docs/architecture.md):

0. checkpoint of version 0, with the origins  - after a crash the next server keeps the origins
1. weights of version J into the blob store   - after a crash nobody uses them: the next server has its own keys
2. grant on `commands`                        - after a crash the next server sends Hello, and workers announce again
3. push on `events`, gradient fetched, update applied in memory
4. grants of the new version                  - as 2; the next server refuses pushes of this term
5. update record on `updates`, acknowledged   - after a crash the next server's TermStarted makes the update void, and
   its batches are applied again
6. checkpoint saved, atomically               - after a crash the next server starts from it and sends it in Welcome
7. `durable` on `commands`                    - after a crash the next Welcome repeats it
8. the worker acknowledges to Kafka           - the committed offset is never ahead of the durable model

Workers wait only for step 4. The record of an update (5) and the cleanup of the model host follow after the grants. The
record is still written before all other effects: a checkpoint (6) is saved only after Kafka has acknowledged it.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar, assert_never

import msgspec

from doll.config import JobConfig
from doll.errors import BlobError, CheckpointError, FencedError, RecordError, RolledBackError
from doll.metrics.states import combined
from doll.model.layout import NO_LAYOUT, WeightsLayout
from doll.process.fault_points import fault_point
from doll.process.health import Heartbeat
from doll.process.signals import on_signal
from doll.ps.channels.control_channel import ControlChannel
from doll.ps.checkpointing import CheckpointWriter, encode_snapshot
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.engine.limit import LimitWatch
from doll.ps.engine.measures import FreshnessMeter, PolicyMeasures
from doll.ps.engine.stopping import StallDetector
from doll.ps.event_log import FileEventLog
from doll.ps.model.model_host import Host
from doll.records.chain import chained
from doll.records.control import (
    AnyRecord,
    Durable,
    Evaluated,
    Fence,
    Finished,
    GetRows,
    Grant,
    HeldOutScore,
    Hello,
    Member,
    Nack,
    NewVersion,
    Push,
    RowsStored,
    ServerStatus,
    Stop,
    TableStatus,
    TermStarted,
    Update,
    Welcome,
    WorkerStatus,
    decode,
)
from doll.records.record_sizes import fitted
from doll.storage.blobs import HEADER_BYTES, Buffer
from doll.storage.checkpoints import Checkpoint, VersionStore
from doll.telemetry import get_logger

log = get_logger(__name__)

A = TypeVar("A")
R = TypeVar("R")
ChannelReport: TypeAlias = tuple[Mapping[int, str], Mapping[str, int]]

# Leases and checkpoints are due within seconds: twenty ticks a second are enough and cost almost nothing.
_POLL_S: Final = 0.05
_READING_POLL_S: Final = 0.002  # while a gradient is being read from a far store
_PERIODIC_S: Final = 1.0  # maximum time between two periodic calls while gradients are being read
_FLUSH_S: Final = 2.0  # time limit for delivery of the last records, as the sender of SIGTERM does not wait long
_FAULT_POINTS: Final[Mapping[type, str]] = {Grant: "ps.after_grant", Durable: "ps.after_durable"}  # after sending


class Outbox(Protocol):
    """The port (interface) that sends the server's records. A destination gets its records in the order of the
    calls."""

    def send_command(self, worker: int, record: AnyRecord) -> None:
        """Send a record to one worker, on `commands`."""

    def send_update(self, record: AnyRecord) -> None:
        """Send a record on `updates`."""

    def send_status(self, record: ServerStatus) -> None:
        """Send the server's status on `metrics`; the record may be lost."""

    def updates_acknowledged(self) -> int:
        """Return the number n such that Kafka has acknowledged the first n records of `send_update`."""

    def flush(self, timeout_s: float) -> int:
        """Wait at most `timeout_s` seconds for the delivery of all records, and return how many are undelivered."""


class ParameterServer:
    """Feeds events to the engine and carries out its actions, until the engine has finished."""

    def __init__(
        self,
        config: JobConfig,
        *,
        engine: Engine,
        host: Host,
        store: VersionStore,
        outbox: Outbox,
        clock: Callable[[], float] = time.monotonic,
        event_log: FileEventLog | None = None,
        channel_report: Callable[[], ChannelReport] = lambda: ({}, {}),
        publish_workers: Callable[[int], bool] = lambda workers: True,
        layout: WeightsLayout = NO_LAYOUT,
        code: str = "",
        chain: bytes = b"",
    ) -> None:
        """`publish_workers`: publishes the job's number of workers for spare processes, and returns whether this has
        succeeded. `channel_report`: returns counters and, for each worker with a control link, the kind of its link.
        `layout`, `code`: layout of the weights and checksum of the task's source, for readers of checkpoints. `chain`:
        hash of the last update of the model (`doll.records.chain`)."""
        self.engine = engine
        self._config = config
        self._host = host
        self._store = store
        self._outbox = outbox
        self._clock = clock
        self._event_log = event_log
        self._channel_report = channel_report
        self._publish_workers = publish_workers
        self._layout, self._code, self._chain = layout, code, chain
        self._workers_published = 0
        self._updates_sent = 0
        self.checkpoints = CheckpointWriter(
            store,
            acknowledged=outbox.updates_acknowledged,
            retry_timeout_s=config.checkpoint.retry_timeout_s,
            clock=clock,
        )
        self._busy_s = 0.0  # time spent on the current update: fetch, add, step, publish
        # The update that was applied last, and the function that makes its record.
        self._unreported: tuple[ev.ApplyUpdate, Callable[[], Update]] | None = None
        self._measures = PolicyMeasures(engine, weights_bytes=HEADER_BYTES + 4 * host.num_values)
        self._freshness = FreshnessMeter(config.freshness)
        self._status_at_s = 0.0
        self._leader_since_s = time.time()
        self._stall = StallDetector(clock())
        self._limit = LimitWatch()
        self._refused: Counter[str] = Counter()  # the engine's counters depend on its events alone, for a replay
        self._welcomed: dict[int, int] = {}  # worker -> session of its last Welcome

    def open(self) -> None:
        """Announce this server: a TermStarted record, then Hello to every worker.

        The origins of a new job become durable before any process learns of them. Otherwise a restart could determine
        other origins. Earlier records would be lost, and batch numbers would mean other offsets.

        Raises:
            FencedError, CheckpointError: as in `run_periodic`.
        """
        engine = self.engine
        if engine.version == 0:
            self._store.save(self._checkpoint(0, engine.snapshot(self._clock())))
            fault_point("ps.after_first_checkpoint")
        self._send_update(
            TermStarted(
                term=engine.term,
                resumed_version=engine.version,
                origins=engine.start.origins,
                records_per_batch=engine.settings.records_per_batch,
                time_s=time.time(),
                generation=engine.start.generation,
                resumed_batches=engine.batches_total,
                run_id=engine.start.run_id,
                grid=engine.start.grid,
                init_from=engine.start.init_from,
                rolled_back_to=engine.start.rolled_back_to,
            )
        )
        for worker in range(engine.settings.places):
            self._outbox.send_command(worker, Hello(term=engine.term))

    def close(self) -> None:
        """Wait for the checkpoint that is being written, if any, and end the thread that writes checkpoints."""
        self.checkpoints.close()

    def prefetch(self, events: Sequence[ev.Event | GetRows]) -> None:
        """Prepare to feed `events` next. Start to read their gradients concurrently, if this is faster."""
        pushes = [event for event in events if isinstance(event, Push) and self.engine.wants(event)]
        if pushes:
            coming = [push.key for push in pushes if push.is_on_its_way]
            self._timed(functools.partial(self._host.prefetch, coming=coming), [push.key for push in pushes])

    def waits_for(self, event: ev.Event | GetRows) -> bool:
        """Return whether `feed` would wait for this event, because its gradient is still being read."""
        return isinstance(event, Push) and self._host.is_reading(event.key)

    def feed(self, event: ev.Event) -> None:
        """Give one event to the engine and carry out its actions, and all events that result. Raises DivergedError if a
        gradient is not finite, and FencedError if a newer parameter server has claimed the job."""
        if isinstance(event, Push | Nack | Evaluated) and event.term > self.engine.term:
            self.stop_if_superseded()
        pending: deque[tuple[ev.Event, Buffer | None]] = deque([(event, None)])
        while pending:
            now = self._clock()
            next_event, blob = pending.popleft()
            if self._event_log is not None:
                self._event_log.write(next_event, now, blob)
            for action in self.engine.handle(next_event, now):
                if not isinstance(action, Grant | NewVersion | ev.PublishWeights):  # workers wait for these
                    self._report_update()
                if isinstance(action, ev.FetchGradient):
                    outcome = self._timed(self._host.fetch, action)
                    if outcome.num_bytes:
                        self._measures.fetched(outcome.num_bytes, outcome.num_sent, outcome.plain_row_bytes)
                    pending.append((outcome.event, outcome.blob))
                else:
                    self._perform(action)
            self._report_update()
        started_s = self._clock()
        self._host.tidy(self.engine.named_versions)
        self._busy_s += self._clock() - started_s

    def send_rows(self, request: GetRows) -> None:
        """Answer a worker that asks for the current rows of tables. A request that cannot be answered is only counted,
        because the worker asks again."""
        engine = self.engine
        is_current = request.term == engine.term and 0 <= request.worker < engine.settings.places
        if not is_current or engine.worker(request.worker).session != request.session:
            self._refused["refused_get_rows"] += 1
            return
        try:
            stored = self._host.store_rows(request, engine.version, subscribes=engine.policy.sends_versions)
        except BlobError as exc:
            self._refused["refused_get_rows"] += 1
            log.warning("rows_refused", worker=request.worker, key=request.key, reason=str(exc))
            return
        self._measures.sent_rows(stored.size, stored.request_bytes)
        self._outbox.send_command(
            request.worker,
            RowsStored(
                term=engine.term, worker=request.worker, session=request.session, number=request.number,
                version=engine.version, key=stored.key, included=engine.worker(request.worker).queue.applied,
            ),
        )  # fmt: skip

    def stop_if_superseded(self) -> None:
        """Raise FencedError if the checkpoint store has a newer term. Without this check, a server that has nothing to
        save would not notice its successor."""
        require_newest_term(self._store, self.engine.term)

    def run_periodic(self) -> None:
        """Do the work that no record triggers: finished checkpoints, timeouts, the status. Call it often.

        Raises:
            FencedError: a newer parameter server has claimed the job.
            CheckpointError: a checkpoint could not be saved for `checkpoint.retry_timeout_s`.
        """
        if (version := self.checkpoints.poll()) is not None:
            fault_point("ps.after_checkpoint")
            self._freshness.stored(version, time.time())
            self.feed(ev.CheckpointStored(version=version))
        self.feed(ev.Tick())
        now = self._clock()
        if now - self._status_at_s >= 1.0:
            self._status_at_s = now
            if self._stall.check(missing := self.engine.shortfall(), now):
                why = self._config.training.policy.shortfall_text(
                    missing, live=self.engine.num_live, workers=self.engine.moves.num_workers,
                    max_pending_batches=self._config.worker.max_pending_batches,
                )  # fmt: skip
                log.error("no_update_possible", reason=why)
            self._outbox.send_status(fitted(self.status()))
            self._host.check()
            workers = self.engine.moves.num_workers
            if workers != self._workers_published and self._publish_workers(workers):
                self._workers_published = workers

    def save_now(self) -> None:
        """Save a checkpoint of the applied updates now and wait for it, because this process is about to end.

        Nothing is saved if Kafka has not acknowledged all update records, because the durable model would contain
        updates without a record. Nothing is saved either while workers hold back a part of their steps.

        Raises:
            FencedError, CheckpointError: as in `run_periodic`.
        """
        self.checkpoints.wait()
        problem = "" if self.engine.is_settled else "workers hold back a part of their steps"
        if self._outbox.updates_acknowledged() < self._updates_sent:
            problem = "Kafka has not acknowledged every update"
        if problem:
            log.warning("final_checkpoint_skipped", version=self.engine.version, reason=problem)
        elif self.engine.version > 0:
            self._store.save(self._checkpoint(self.engine.version, self.engine.snapshot(self._clock())))

    def status(self) -> ServerStatus:
        """Return the engine's state for other processes, as sent on the `metrics` topic."""
        engine, now, time_s, measures = self.engine, self._clock(), time.time(), self._measures.report()
        kinds, counters = self._channel_report()
        return ServerStatus(
            term=engine.term, time_s=time_s, leader_since_s=self._leader_since_s, pid=os.getpid(),
            version=engine.version, durable_version=engine.durable_version, samples_total=engine.samples_total,
            batches_total=engine.batches_total, waiting_batches=engine.num_waiting,
            computing_batches=engine.num_computing, shortfall_batches=engine.shortfall(),
            stalled_s=self._stall.stalled_s(now),
            workers=tuple(
                WorkerStatus(
                    worker=worker.number, is_live=worker.is_live, session=worker.session,
                    incarnation=worker.incarnation, restarts=worker.restarts, market=worker.market,
                    retained_batches=worker.retained, lag_records=worker.lag,
                    live_since_s=time_s - (now - worker.live_since_s) if worker.is_live else 0.0,
                    silent_s=max(0.0, now - worker.last_heard_s) if worker.is_live else 0.0, batch_s=worker.batch_s,
                    time_limit_s=engine.time_limit_s(worker), is_stalled=worker.stalled,
                    waiting_for=worker.waiting_for,
                    control=kinds.get(worker.number, "kafka"), partitions=len(worker.queue.partitions),
                    is_spare=worker.is_here and not worker.is_live,
                )
                for worker in engine.workers()
                if worker.number < engine.moves.num_workers or worker.session
            ),
            num_workers=engine.moves.num_workers, released=tuple(sorted(engine.moves.released)),
            moving_partitions=len(engine.moves.targets), is_kept=engine.is_kept,
            run_id=engine.start.run_id, source_ended=bool(engine.ending.ends),
            counters={**engine.counters, **counters, **self._refused}, measures=measures,
            limit=self._limit.observe(engine, now, computing_s=measures.computing_s, idle_s=measures.idle_s),
            dead_reasons=engine.refusals.reasons.in_order(), recent_records=engine.refusals.recent_records,
            recent_refused=engine.refusals.recent_refused, skipped=engine.refusals.skipped.in_order(),
            tables=tuple(
                TableStatus(name=name, **totals._asdict()) for name, totals in self._host.table_totals().items()
            ),
            shards=self._host.shard_statuses(), learned=self._freshness.learned, durable=self._freshness.durable,
        )  # fmt: skip

    # --- actions ----------------------------------------------------------------------------------------------------

    def _perform(self, action: ev.EngineAction) -> None:
        if isinstance(action, ev.Command):
            self._send(action)
            return
        match action:
            case ev.PublishWeights():
                self._timed(self._host.publish, action.version)
                fault_point("ps.after_weights")
            case ev.ApplyUpdate():
                self._apply(action)
            case ev.StoreCheckpoint():
                checkpoint = self._checkpoint(action.version, action.snapshot)
                replaced = self.checkpoints.order(checkpoint, after_records=self._updates_sent)
                if replaced is not None:
                    self._host.forget_snapshot(replaced)
            case ev.DropGradient():
                log.info("gradient_dropped", key=action.key, reason=action.reason)
                self._host.drop(action.key, action.held)
            case ev.RollBack():
                raise RolledBackError(
                    f"{action.reason}: this server ends, and the next one begins again from version "
                    f"{self.engine.durable_version}"
                )
            case ev.RepublishWeights():
                log.warning("weights_missing", version=action.version, action="published again")
                self._timed(self._host.republish, action.version)
            case ev.ReleaseWeights():
                self._host.release(action.version)
            case ev.SendHello():
                self._outbox.send_command(action.worker, Hello(term=self.engine.term))
            case ev.Finish():
                self._finish(action)
            case ev.FetchGradient():
                raise AssertionError("`feed` carries this out: it has an outcome")
            case _:
                assert_never(action)

    def _timed(self, call: Callable[[A], R], argument: A) -> R:
        """Call `call(argument)`, and add the time of the call to the server's time for the update."""
        started_s = self._clock()
        try:
            return call(argument)
        finally:
            self._busy_s += self._clock() - started_s

    def _send(self, record: ev.Command) -> None:
        match record:
            case Welcome():
                self._note_welcome(record)
            case NewVersion():
                record = self._with_rows(record)
            case Fence():
                log.info("worker_fenced", worker=record.worker, worker_process=record.process)
        self._outbox.send_command(record.worker, record)
        if (point := _FAULT_POINTS.get(type(record))) is not None:
            fault_point(point, self._flush_for_fault_point)

    def _note_welcome(self, record: Welcome) -> None:
        if self._welcomed.get(record.worker) != record.session:  # workers repeat a Join until it is answered
            self._welcomed[record.worker] = record.session
            self._measures.joined(record.worker)
            self._host.forget_rows(record.worker)
            log.info(
                "worker_joined", worker=record.worker, worker_process=record.process, session=record.session,
                partitions=len(record.served),
            )  # fmt: skip

    def _with_rows(self, record: NewVersion) -> NewVersion:
        """Return the record with the blob key of the changed table rows that the record's worker has asked for."""
        self._measures.sent_version(record.worker, record.version)
        rows = self._host.changed_rows(record.worker, record.version)
        if rows is None:
            return record
        self._measures.sent_rows(rows.size)
        return msgspec.structs.replace(record, rows_key=rows.key, rows_since=rows.since)

    def _apply(self, action: ev.ApplyUpdate) -> None:
        num_samples = self._timed(self._host.apply, action)
        self._unreported = action, functools.partial(
            update_record, action, term=self.engine.term, num_samples=num_samples, apply_s=self._busy_s,
            now=self._clock(), counters=self.engine.counters,
        )  # fmt: skip
        self._busy_s = 0.0

    def _report_update(self) -> None:
        """Measure the update that was applied last, and send its record. Do nothing if this was done before."""
        if self._unreported is None:
            return
        (update, make_record), self._unreported = self._unreported, None
        self._measures.applied(update)
        record = make_record()
        self._freshness.applied(update, record.time_s)
        self._send_update(record)
        fault_point("ps.after_update", self._flush_for_fault_point)

    def _flush_for_fault_point(self) -> None:
        """Wait until the records sent so far have arrived; for fault points."""
        self._outbox.flush(10.0)

    def _send_update(self, record: TermStarted | Update | Finished) -> None:
        if isinstance(record, Update):
            record = chained(record, self._chain)
            self._chain = record.chain
        self._updates_sent += 1
        self._outbox.send_update(record)

    def _checkpoint(self, version: int, snapshot: ev.EngineSnapshot) -> Checkpoint:
        return Checkpoint(
            job=self._config.job, fingerprint=self.engine.settings.fingerprint, term=self.engine.term, version=version,
            state=encode_snapshot(snapshot), tensors=self._host.tensors(), layout=self._layout, code=self._code,
            chain=self._chain, changes=self._host.row_changes(),
        )  # fmt: skip

    def _finish(self, action: ev.Finish) -> None:
        self._outbox.send_status(fitted(self.status()))  # with the final measurements
        self._send_update(
            Finished(
                term=self.engine.term,
                version=action.version,
                reason=action.reason,
                time_s=time.time(),
                error=action.error,
            )
        )
        for worker in range(self.engine.settings.places):
            self._outbox.send_command(worker, Stop(term=self.engine.term, reason=action.reason))
        self._host.end()
        log.info("finished", reason=action.reason, version=action.version, samples=self.engine.samples_total)


def require_newest_term(store: VersionStore, term: int) -> None:
    """Raise FencedError if the checkpoint store has a newer term. Raise CheckpointError if it does not answer."""
    newest = store.newest_term()
    if newest > term:
        raise FencedError(
            f"parameter server term {term} is over: term {newest} has claimed the job; this process must stop"
        )


class Signals:
    """The signals of this process. SIGINT requests the end of the job, SIGTERM the end of this process only."""

    end_job = False
    leave = False
    leave_reason = "SIGTERM"
    partitions = 0  # of the samples topic, at the last check

    def __init__(self) -> None:
        on_signal(signal.SIGINT, functools.partial(setattr, self, "end_job", True))
        on_signal(signal.SIGTERM, functools.partial(setattr, self, "leave", True))

    def stop_for_the_topic(self) -> None:
        """Request the end of this process, because the samples topic has changed. Another thread calls this method."""
        self.leave_reason = "the samples topic"
        self.leave = True

    def note_partitions(self, partitions: int) -> None:
        """Note the current number of partitions of the samples topic. Another thread calls this method."""
        self.partitions = partitions


def serve(
    server: ParameterServer, channel: ControlChannel, signals: Signals, lease_s: float, heartbeat: Heartbeat
) -> None:
    """Run the server until the job has finished, or until SIGTERM; after SIGTERM, save a checkpoint.

    Raises:
        FencedError: a newer server has claimed the job.
        CheckpointError: checkpoints cannot be saved; or this process paused for longer than its lease, and the
            checkpoint store does not answer.
        DivergedError: the model diverged.
    """
    engine = server.engine
    partitions = len(engine.start.origins)
    looped_s = checked_s = periodic_s = time.monotonic()
    # Events to feed, in order. While the gradient of the first one is being read, later ones are requested.
    events: deque[ev.Event | GetRows] = deque()
    while engine.finished is None:
        incoming = channel.poll(_READING_POLL_S if events else _POLL_S)
        now = time.monotonic()
        heartbeat.beat("loop")
        if channel.had_traffic():
            heartbeat.beat("kafka")
        if now - checked_s > lease_s:
            # A standby may have taken over from a server that was frozen, waited for Redis or was cut off from Kafka.
            _check_fencing(server, paused_s=now - looped_s, lease_s=lease_s)
            checked_s = now
        looped_s = now
        came: list[ev.Event | GetRows] = [
            *incoming.records,
            *(ev.GrantsLost(worker=worker) for worker in incoming.changed),
            *_decode(server, incoming.values),
        ]
        server.prefetch(came)
        events += came
        while events and not server.waits_for(events[0]):
            event = events.popleft()
            if isinstance(event, GetRows):
                server.send_rows(event)
            else:
                server.feed(event)
        if signals.partitions > partitions and engine.stopping is None:
            partitions = signals.partitions
            server.feed(ev.TopicGrew(partitions=partitions))
            log.info("partitions_added", partitions=partitions)
        if signals.end_job:
            server.feed(ev.StopRequested(reason="interrupted"))
        if signals.leave:
            channel.flush(_FLUSH_S)
            server.save_now()
            log.info("leaving", version=engine.version, reason=f"{signals.leave_reason}; the job can be resumed")
            return
        # Leases might expire while their renewals wait in `events`, which is never empty if there are many pushes.
        if not events or now - periodic_s > _PERIODIC_S:
            periodic_s = now
            server.run_periodic()


def deliver(channel: ControlChannel, signals: Signals, heartbeat: Heartbeat) -> None:
    """Wait until Kafka has every record, or until SIGTERM. The last record tells other processes of the end."""
    warned = False
    while (undelivered := channel.flush(_FLUSH_S)) and not signals.leave:
        heartbeat.beat("loop")
        if not warned:
            log.warning(
                "kafka_unavailable", undelivered=undelivered, hint="waiting for it, to report that the job has ended"
            )
        warned = True


def _decode(server: ParameterServer, values: Sequence[bytes | None]) -> list[ev.Event | GetRows]:
    """Decode records of `events`. Records that do not belong to this topic are counted and refused."""
    events: list[ev.Event | GetRows] = []
    for value in values:
        try:
            record = decode(value)
            if not isinstance(record, ev.ReceivedEvent | GetRows):
                raise RecordError(f"{type(record).__name__} does not belong on this topic")
        except RecordError as exc:
            server.engine.counters["refused_record"] += 1
            log.warning("record_refused", topic="events", reason=str(exc))
            continue
        events.append(record)
    return events


def _check_fencing(server: ParameterServer, *, paused_s: float, lease_s: float) -> None:
    """Raise FencedError if this process has a successor. Raise CheckpointError if this process paused for longer than
    its lease and the checkpoint store does not answer."""
    if paused_s > lease_s:
        log.warning("paused_beyond_lease", seconds=round(paused_s, 1))
    try:
        server.stop_if_superseded()
    except CheckpointError as exc:
        if paused_s > lease_s:
            raise  # this server must not write anything before it knows whether it has a successor
        log.warning("store_unavailable", error=str(exc), action="trying again")


def update_record(
    update: ev.ApplyUpdate, *, term: int, num_samples: int, apply_s: float, now: float, counters: Counter[str]
) -> Update:  # fmt: skip
    """Return the record of one update, which has learned `num_samples` samples and took `apply_s` seconds at the
    server. `now`: time at which the update was applied, in monotonic seconds on the clock of the grants."""
    batches = [batch for item in update.sets for batch in item.push.batches]
    metrics, num_refused = combined([(batch.metric_sums, batch.total_weight) for batch in batches])
    if num_refused:
        counters["refused_metric_states"] += num_refused
    weight = sum(batch.total_weight for batch in batches)
    held_out = held_out_score([batch.held_out_score for batch in batches if batch.held_out_score is not None], counters)
    return Update(
        term=term,
        version=update.version,
        members=tuple(_member(item, batch, now) for item in update.sets for batch in item.batches),
        n_samples=num_samples,
        loss=float(sum(batch.loss_sum for batch in batches)) / weight if weight else 0.0,
        metrics=metrics,
        samples_total=update.samples_total,
        batches_total=update.batches_total,
        apply_s=apply_s,
        grant_to_update_s=now
        - min((batch.granted_at_s for item in update.sets for batch in item.batches), default=now),
        time_s=time.time(),
        settled=update.settled,
        events=update.events,
        held_out_score=held_out,
        lr_factor=update.lr_factor,
        ema_factor=update.ema_factor,
    )


def held_out_score(scores: Sequence[HeldOutScore], counters: Counter[str]) -> HeldOutScore | None:
    """Return the score of the samples of all `scores`; None if there are none."""
    if not scores:
        return None
    weight = sum(score.weight for score in scores)
    means, num_refused = combined([(score.metric_sums, score.weight) for score in scores])
    counters.update({"refused_metric_states": num_refused} if num_refused else {})
    return HeldOutScore(
        n_samples=sum(score.n_samples for score in scores), weight=weight,
        loss_sum=sum(score.loss_sum for score in scores),
        metric_sums={name: mean if isinstance(mean, bytes) else mean * weight for name, mean in means.items()},
    )  # fmt: skip


def _member(item: ev.AppliedSet, batch: ev.AppliedBatch, now: float) -> Member:
    push, pushed, size = item.push, batch.pushed, len(item.batches)
    return Member(
        worker=push.worker, partition=batch.partition, batch=batch.number, lo=batch.lo, hi=batch.hi,
        n_samples=pushed.n_samples,
        base_version=push.version if pushed.version < 0 else pushed.version, dead=pushed.dead, gaps=pushed.gaps,
        lost=pushed.lost, dead_samples=pushed.dead_samples, compute_s=pushed.compute_s, fetch_s=push.fetch_s / size,
        store_s=push.store_s / size, wait_s=pushed.wait_s, grant_to_push_s=item.received_at_s - batch.granted_at_s,
        market=push.market, held_back=push.holds_back, set_grant_id=item.grant_id,
        batches=batch.count, cut=batch.cut, loss_sum=pushed.loss_sum, weight=pushed.weight,
        shared_loss=pushed.shared_loss, times=pushed.times, held_out=pushed.held_out,
        grant_to_update_s=now - batch.granted_at_s,
    )  # fmt: skip
