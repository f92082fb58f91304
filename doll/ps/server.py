"""The parameter server without its wires: engine, optimizer, blobs and checkpoints put together.

Order of effects, and what a crash between any two does (design, section 5):

0. checkpoint of version 0, with the origins  - then crash: the next server keeps the origins
1. weights of version J into the blob store   - then crash: nobody uses them, the next server has its own keys
2. grant on `commands`                        - then crash: the next server says Hello, workers announce again
3. push on `events`, gradient fetched, update applied in memory
4. update record on `updates`, acknowledged   - then crash: the next server's TermStarted record voids it, it is done again
5. checkpoint saved, atomically               - then crash: the next server starts from it and says so in Welcome
6. `durable` on `commands`                    - then crash: the next Welcome says it again
7. the worker acknowledges to Kafka           - so the committed offset is never ahead of the durable model
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, assert_never

import msgspec
import numpy as np
import numpy.typing as npt

from doll.bounded import short
from doll.config import JobConfig
from doll.errors import BlobError, CheckpointError, FencedError
from doll.process.fault_points import fault_point
from doll.ps import events as ev
from doll.ps.engine import Engine
from doll.ps.optimizer import Optimizer
from doll.ps.stuck import StallDetector, shortfall
from doll.records import (
    AnyRecord,
    Durable,
    Evaluated,
    Fence,
    Finished,
    Grant,
    Hello,
    Member,
    Metric,
    Nack,
    Push,
    Stop,
    TermStarted,
    Update,
    Welcome,
)
from doll.storage.blobs import Blobs, Buffer, Latest, decode_blob, encode_blob, encode_latest, latest_key, weights_key
from doll.storage.checkpoints import Checkpoint, CheckpointStore
from doll.telemetry import get_logger

log = get_logger(__name__)

_SAVE_AGAIN_S = 1.0


class Outbox(Protocol):
    """Where the parameter server's records go. Order is kept per destination."""

    def send_command(self, worker: int, record: AnyRecord) -> None:
        """A record on `commands`, for one worker."""

    def send_update(self, record: AnyRecord) -> None:
        """A record on `updates`."""

    def send_metric(self, record: Metric) -> None:
        """A record on `metrics`; may be lost."""

    def updates_acknowledged(self) -> int:
        """How many of the `send_update` records so far are safe in Kafka: the first so many, in order."""

    def flush(self, timeout_s: float) -> int:
        """Wait until everything is delivered; how many records are not when the time is over."""


class EventLog(Protocol):
    """Keeps what the engine is told, so that the run can be replayed."""

    def write(self, event: ev.Event, now: float, gradient: Buffer | None = None) -> None:
        """One event; `gradient` is the blob that came with a GradientFetched."""


class ParameterServer:
    """Feeds events to the engine and carries out its actions, until the engine has finished."""

    def __init__(
        self,
        config: JobConfig,
        *,
        engine: Engine,
        optimizer: Optimizer,
        blobs: Blobs,
        store: CheckpointStore,
        outbox: Outbox,
        fingerprint: str,
        clock: Callable[[], float] = time.monotonic,
        event_log: EventLog | None = None,
    ) -> None:
        self.engine = engine
        self._config = config
        self._optimizer = optimizer
        self._blobs = blobs
        self._store = store
        self._outbox = outbox
        self._fingerprint = fingerprint
        self._clock = clock
        self._event_log = event_log
        self._gradients: dict[int, npt.NDArray[np.float32]] = {}
        self._blob_log: dict[int, Buffer] = {}  # fetched and not logged yet
        self._published: deque[int] = deque()
        self._updates_sent = 0
        self._to_save: tuple[int, Checkpoint] | None = None  # waits for this many update records to be safe
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: tuple[Checkpoint, Future[None]] | None = None
        self._save_failing_s: float | None = None  # since when
        self._retry_save_at_s = 0.0
        self._busy_s = 0.0  # spent on the update under way: fetch, add, step, publish
        self._metrics_at_s = 0.0
        self._stall = StallDetector(clock())
        self._welcomed: dict[int, int] = {}

    def open(self) -> None:
        """Tell the world that this server is there: a TermStarted record, then Hello to every worker.

        A new job's origins are made durable before anybody hears of them: were they taken again after a restart, what
        came meanwhile would be lost, and a batch of the same number would be other offsets.

        Raises:
            FencedError, CheckpointError: as in `turn`.
        """
        engine = self.engine
        if engine.version == 0:
            self._store.save(self._checkpoint(0, engine.snapshot(self._clock())))
            fault_point("ps.after_first_checkpoint")
        self._send_update(
            TermStarted(
                term=engine.term,
                resumed_version=engine.version,
                origins=engine.origins,
                records_per_batch=engine.settings.records_per_batch,
                time_s=time.time(),
                generation=engine.generation,
                resumed_batches=engine.batches_total,
            )
        )
        for worker in range(engine.settings.num_workers):
            self._outbox.send_command(worker, Hello(term=engine.term))

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and end the thread that writes it."""
        self._saver.shutdown(wait=True)

    def feed(self, event: ev.Event) -> None:
        """Tell the engine and do what it says, with all that follows from it.

        Raises:
            DivergedError: the gradient is not finite.
            FencedError: a newer parameter server has claimed the job.
        """
        if isinstance(event, Push | Nack | Evaluated) and event.term > self.engine.term:
            self.stop_if_superseded()
        pending = deque([event])
        while pending:
            now = self._clock()
            fact = pending.popleft()
            if self._event_log is not None:
                blob = self._blob_log.pop(fact.grant) if isinstance(fact, ev.GradientFetched) else None
                self._event_log.write(fact, now, blob)
            for action in self.engine.handle(fact, now):
                outcome = self._perform(action)
                if outcome is not None:
                    pending.append(outcome)

    def stop_if_superseded(self) -> None:
        """Ask the store: a server with nothing to save would not find out that it has a successor.

        Raises:
            FencedError: it has.
        """
        newest = self._store.newest_term()
        if newest > self.engine.term:
            raise FencedError(
                f"parameter server term {self.engine.term} is over: term {newest} has claimed the job; "
                "this process must stop"
            )

    def turn(self) -> None:
        """What does not wait for a message: finished checkpoints, time, measurements. Call it often.

        Raises:
            FencedError: a newer parameter server has claimed the job.
            CheckpointError: a checkpoint could not be saved for `checkpoint.retry_timeout_s`.
        """
        if self._to_save is not None and self._saving is None and self._clock() >= self._retry_save_at_s:
            needed, checkpoint = self._to_save
            if self._outbox.updates_acknowledged() >= needed:
                self._to_save = None
                self._saving = (checkpoint, self._saver.submit(self._store.save, checkpoint))
        if self._saving is not None and self._saving[1].done():
            checkpoint, future = self._saving
            self._saving = None
            if self._saved(future):
                fault_point("ps.after_checkpoint")
                self.feed(ev.CheckpointStored(version=checkpoint.version))
            else:
                self._to_save = (0, checkpoint)
        self.feed(ev.Tick())
        now = self._clock()
        if now - self._metrics_at_s >= 1.0:
            self._metrics_at_s = now
            if (why := self._stall.check(self.engine, now)) is not None:
                log.error("stuck", reason=why)
            self._outbox.send_metric(Metric(source="ps", values=self.measurements(), time_s=time.time()))

    def _saved(self, future: Future[None]) -> bool:
        """Whether a save has done it; if not, it is made again: a store may be away for a while, as Redis may."""
        try:
            future.result()
        except CheckpointError as exc:
            now = self._clock()
            self._save_failing_s = now if self._save_failing_s is None else self._save_failing_s
            if now - self._save_failing_s > self._config.checkpoint.retry_timeout_s:
                raise
            log.warning("checkpoint_not_saved", error=str(exc), action="trying again")
            self._retry_save_at_s = now + _SAVE_AGAIN_S
            return False
        self._save_failing_s = None
        return True

    def save_now(self) -> None:
        """Checkpoint what is applied, whatever is due, and wait for it: this process is about to go.

        Nothing is saved while an update record is not safe in Kafka: the durable model would have no lineage.

        Raises:
            FencedError, CheckpointError: as in `turn`.
        """
        if self._saving is not None:
            with suppress(CheckpointError):  # what fails now and then is tried once more, below
                self._saving[1].result()
        if self._outbox.updates_acknowledged() < self._updates_sent:
            log.warning(
                "final_checkpoint_skipped",
                version=self.engine.version,
                reason="Kafka has not acknowledged every update",
            )
        elif self.engine.version > 0:
            self._store.save(self._checkpoint(self.engine.version, self.engine.snapshot(self._clock())))

    def measurements(self) -> dict[str, float]:
        """The engine's state in numbers, for the `metrics` topic."""
        engine = self.engine
        values: dict[str, float] = {
            "term": engine.term,
            "pid": os.getpid(),  # tells which of several servers it is that leads
            "version": engine.version,
            "durable_version": engine.durable_version,
            "samples_total": engine.samples_total,
            "waiting_batches": engine.num_waiting,
            "computing_batches": engine.num_computing,
            "shortfall_batches": shortfall(engine),
            "stuck_s": self._stall.stalled_s(self._clock()),
        }
        for worker, slot in engine.workers():
            values |= {
                f"worker_{worker}_live": float(slot.is_live),
                f"worker_{worker}_session": slot.session,
                f"worker_{worker}_retained_batches": slot.retained,
                f"worker_{worker}_lag_records": slot.lag,
            }
            if slot.is_live:
                values[f"worker_{worker}_silent_s"] = max(0.0, self._clock() - slot.last_heard_s)
        return values | {f"{name}_total": count for name, count in engine.counters.items()}

    # --- actions ----------------------------------------------------------------------------------------------------

    def _perform(self, action: ev.EngineAction) -> ev.Event | None:
        term = self.engine.term
        match action:
            case ev.SendGrant():
                key = self._publish(action.version)
                fault_point("ps.after_weights")
                self._outbox.send_command(
                    action.worker,
                    Grant(
                        term=term,
                        worker=action.worker,
                        session=action.session,
                        batch=action.batch,
                        grant=action.grant,
                        version=action.version,
                        key=key,
                    ),
                )
                fault_point("ps.after_grant", self._flush_for_fault_point)
            case ev.FetchGradient():
                return self._fetch(action)
            case ev.ApplyUpdate():
                self._apply(action)
            case ev.StoreCheckpoint():
                self._to_save = (self._updates_sent, self._checkpoint(action.version, action.snapshot))
            case ev.SendDurable():
                self._outbox.send_command(action.worker, Durable(term=term, worker=action.worker, until=action.until))
                fault_point("ps.after_durable", self._flush_for_fault_point)
            case ev.DropGradient():
                log.info("gradient_dropped", key=action.key, reason=action.reason)
                self._blobs.delete(action.key)
            case ev.RepublishWeights():
                log.warning("weights_missing", version=action.version, action="published again")
                if action.version in self._published:
                    self._published.remove(action.version)
                self._publish(action.version)
            case ev.SendWelcome():
                if self._welcomed.get(action.worker) != action.session:  # a Join is repeated until it is answered
                    self._welcomed[action.worker] = action.session
                    log.info(
                        "worker_joined", worker=action.worker, instance=action.instance, session=action.session,
                        next_batch=action.next_batch,
                    )  # fmt: skip
                self._outbox.send_command(
                    action.worker,
                    Welcome(
                        term=term,
                        worker=action.worker,
                        instance=action.instance,
                        session=action.session,
                        origin=self.engine.origins[action.worker],
                        next_batch=action.next_batch,
                        fingerprint=self._fingerprint,
                        incarnation=action.incarnation,
                        samples_id=self.engine.samples_id,
                        generation=self.engine.generation,
                    ),
                )
            case ev.SendFence():
                log.info("worker_fenced", worker=action.worker, instance=action.instance)
                self._outbox.send_command(
                    action.worker, Fence(term=term, worker=action.worker, instance=action.instance)
                )
            case ev.SendHello():
                self._outbox.send_command(action.worker, Hello(term=term))
            case ev.Finish():
                self._finish(action)
            case _:
                assert_never(action)
        return None

    def _publish(self, version: int) -> str:
        """The key of the current weights, which are in the blob store when this returns."""
        assert version == self.engine.version, "only the current weights are ever granted"
        key = weights_key(self._config.job, self.engine.term, version)
        if version not in self._published:
            started = self._clock()
            ttl_s = self._config.blobs.ttl_s
            self._blobs.put(
                key, encode_blob(self._optimizer.weights, job=self._config.job, kind="w", version=version), ttl_s
            )
            latest = Latest(term=self.engine.term, version=version, key=key)
            self._blobs.put(latest_key(self._config.job), encode_latest(latest), ttl_s)
            self._published.append(version)
            while len(self._published) > self._config.blobs.keep_versions:
                self._blobs.delete(weights_key(self._config.job, self.engine.term, self._published.popleft()))
            self._busy_s += self._clock() - started
        return key

    def _fetch(self, action: ev.FetchGradient) -> ev.Event:
        started = self._clock()
        numel = self._optimizer.weights.size
        data = self._blobs.get(action.key)
        try:
            if data is None:
                raise BlobError("not in the blob store (any more)")
            gradient = decode_blob(data, job=self._config.job, kind="g", version=action.version, numel=numel)
        except BlobError as exc:
            log.warning("gradient_lost", key=action.key, reason=str(exc), action="its batch is computed again")
            return ev.GradientLost(grant=action.grant, reason=str(exc))
        finally:
            self._busy_s += self._clock() - started
        self._gradients[action.grant] = gradient
        if self._event_log is not None:
            self._blob_log[action.grant] = data
        return ev.GradientFetched(grant=action.grant)

    def _apply(self, action: ev.ApplyUpdate) -> None:
        started = self._clock()
        gradients = [self._gradients.pop(item.grant) for item in action.batches if item.push.key]
        num_samples = sum(item.push.n_samples for item in action.batches)
        self._optimizer.apply(gradients, action.scale, num_samples)
        fault_point("ps.after_apply")
        self._blobs.delete(*(item.push.key for item in action.batches if item.push.key))
        now = self._clock()
        self._busy_s += now - started
        names = {name for item in action.batches for name in item.push.metric_sums}
        self._send_update(
            Update(
                term=self.engine.term,
                version=action.version,
                members=tuple(_member(item) for item in action.batches),
                n_samples=num_samples,
                loss=_mean((item.push.loss_sum for item in action.batches), num_samples),
                metrics={
                    name: _mean((item.push.metric_sums.get(name, 0.0) for item in action.batches), num_samples)
                    for name in sorted(names)
                },
                samples_total=action.samples_total,
                batches_total=action.batches_total,
                apply_s=self._busy_s,
                grant_to_update_s=now - min(item.granted_at_s for item in action.batches),
                time_s=time.time(),
            )
        )
        self._busy_s = 0.0
        fault_point("ps.after_update", self._flush_for_fault_point)

    def _flush_for_fault_point(self) -> None:
        """For fault points: what was sent before has arrived."""
        self._outbox.flush(10.0)

    def _send_update(self, record: TermStarted | Update | Finished) -> None:
        self._updates_sent += 1
        self._outbox.send_update(record)

    def _checkpoint(self, version: int, snapshot: ev.EngineSnapshot) -> Checkpoint:
        return Checkpoint(
            job=self._config.job, fingerprint=self._fingerprint, term=self.engine.term, version=version,
            state=msgspec.msgpack.encode(snapshot), tensors=self._optimizer.tensors(),
        )  # fmt: skip

    def _finish(self, action: ev.Finish) -> None:
        self._publish(action.version)  # the evaluator's last word is about this version
        self._send_update(
            Finished(term=self.engine.term, version=action.version, reason=action.reason, time_s=time.time())
        )
        for worker in range(self.engine.settings.num_workers):
            self._outbox.send_command(worker, Stop(term=self.engine.term, reason=action.reason))
        log.info("finished", reason=action.reason, version=action.version, samples=self.engine.samples_total)


def _member(item: ev.AppliedBatch) -> Member:
    push = item.push
    return Member(
        worker=push.worker, batch=push.batch, lo=item.lo, hi=item.hi, n_samples=push.n_samples,
        base_version=push.version, dead=push.dead, gaps=push.gaps, lost=push.lost, dead_samples=push.dead_samples,
        compute_s=push.compute_s, fetch_s=push.fetch_s, store_s=push.store_s, wait_s=push.wait_s,
        grant_to_push_s=item.received_at_s - item.granted_at_s, market=push.market,
    )  # fmt: skip


def _mean(sums: Iterable[float], count: int) -> float:
    return float(sum(sums)) / count if count else 0.0


def restore(checkpoint: Checkpoint) -> ev.EngineSnapshot:
    """The engine's part of a checkpoint.

    Raises:
        CheckpointError: it holds none that this build reads.
    """
    try:
        return msgspec.msgpack.decode(checkpoint.state, type=ev.EngineSnapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise CheckpointError(
            f"version {checkpoint.version} of job {checkpoint.job!r} holds no engine state that this build reads: use "
            f"the release that wrote it ({short(exc)})"
        ) from exc
