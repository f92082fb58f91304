"""Decoding of a worker's batches. Refused records are stored in the `dead` topic before an update can count them.

A sample that can be decoded and would spoil the model is refused by `doll.consumers.compute.guard`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from doll.config import JobConfig
from doll.consumers.channels.kafka_channel import WorkerChannel
from doll.consumers.intake.decoding import DecodedBatch, RawRecords, RefusedSamples, SeenForms, decode_records, refuse
from doll.consumers.protocol.worker_core import Batch, ComputedBatch
from doll.errors import RetryLater
from doll.process.fault_points import fault_point
from doll.records.bounded import short
from doll.records.control import DeadLetter
from doll.records.refusals import MAX_REASON_CHARS, ReasonCounts, UnreadValue
from doll.task.base import Task
from doll.task.holdout import Split
from doll.telemetry import get_logger

log = get_logger(__name__)

RETRY_FIRST_S: Final = 0.25
RETRY_MAX_S: Final = 10.0
_MAX_PAYLOAD_BYTES: Final = 65_536  # a dead letter keeps so much of the record; the whole record is at its offset


def usable_samples(batch: Batch) -> ComputedBatch:
    """Return the samples that are usable after decoding. The gradient may show that some of them are not usable."""
    reasons = reasons_of(batch.data.refused) if batch.dead or batch.dead_samples else ()
    return ComputedBatch(batch.num_samples, dead=batch.dead, dead_samples=batch.dead_samples, dead_reasons=reasons)


def reasons_of(refused: Iterable[RefusedSamples]) -> tuple[tuple[str, int], ...]:
    """Return the reasons for which these samples were refused, with the number of dead letters for each reason."""
    return ReasonCounts((item.reason, 1) for item in refused).in_order()


class DeadLetters:
    """The decoder of one worker's batches. It writes dead letters for refused samples, also for samples that are
    refused during the computation of the gradient. It sets records apart that are held out (`evaluation.holdout`).

    Two threads may call `decode` and `refuse_samples` at the same time. Each call may raise ServiceUnavailableError if
    Kafka does not take a dead letter.
    """

    def __init__(
        self, config: JobConfig, task: Task, channel: WorkerChannel, worker: int, term: Callable[[], int]
    ) -> None:
        """Create the decoder. `term` returns the term of the newest server that the worker knows."""
        self._data = config.data
        self._task = task
        self._seen = SeenForms(task)
        self._split = Split.of_job(config)
        self._channel = channel
        self._topic = config.topic("samples")
        self._worker = worker
        self._term = term

    def decode(self, records: RawRecords) -> DecodedBatch:
        data = self._data
        needed = records if self._task.reads_envelopes else records._replace(envelopes=())
        decoded = decode_records(
            self._task, needed, samples_per_record=data.samples_per_record, max_record_bytes=data.max_record_bytes,
            skip_tombstones=data.tombstones == "skip", seen=self._seen,
        )  # fmt: skip
        if decoded.refused:
            values = zip(records.offsets, records.values, strict=True)
            self._send(
                records.partition, decoded.refused, {offset: value for offset, value in values if value is not None}
            )
            fault_point("worker.after_dead_letter")
        return decoded if self._split is None else decoded.without_held_out(records, self._split)

    def refuse_samples(self, batch: Batch, bad: Mapping[int, str]) -> ComputedBatch:
        """Write dead letters for some samples of the batch: `bad` contains the reason for each of their positions.
        Return the remaining samples, like `usable_samples`. The batch does not change."""
        refused = refuse(batch.data, bad)
        # The values are not in memory any more: they are dropped after a batch is decoded.
        values = self._channel.read_values(self._topic, batch.partition, [item.offset for item in refused])
        self._send(batch.partition, refused, values)
        fault_point("worker.after_guard")
        partly = {item.offset: item.samples for item in batch.data.refused if not item.whole}
        for item in refused:
            partly[item.offset] = 0 if item.whole else partly.get(item.offset, 0) + item.samples
        dead = {*batch.dead, *(item.offset for item in refused if item.whole)}
        reasons = reasons_of([*batch.data.refused, *refused])
        return ComputedBatch(
            batch.num_samples - len(bad), dead=tuple(sorted(dead)), dead_samples=sum(partly.values()),
            dead_reasons=reasons,
        )  # fmt: skip

    def _send(self, partition: int, refused: Sequence[RefusedSamples], values: Mapping[int, bytes]) -> None:
        heads, sizes = {}, {}
        for item in refused:
            value = values.get(item.offset, b"")
            unread = value if isinstance(value, UnreadValue) else None
            heads[item.offset] = value[:_MAX_PAYLOAD_BYTES] if unread is None else unread.head
            sizes[item.offset] = len(value) if unread is None else unread.num_bytes
        letters = [
            DeadLetter(
                worker=self._worker, partition=partition, offset=item.offset, code=item.code,
                reason=item.reason, payload=heads[item.offset], payload_bytes=sizes[item.offset],
                samples=item.samples, whole=item.whole,
                time_s=time.time(), term=self._term(),
            )
            for item in refused
        ]  # fmt: skip
        first = refused[0]
        log.warning("dead_lettered", records=len(letters), first_offset=first.offset, first_reason=first.reason)
        self._channel.send_dead_letters(letters)


class Decoder:
    """A decoder with its own thread, so that decoding delays no gradient. It decodes in the order of the calls.

    Only one thread may call it. Another thread sets the futures.
    """

    depth = 8  # maximum number of batches at once: while some wait, neither thread must be woken
    waiting_for = ""  # the reason why a batch cannot be decoded now; "": batches can be decoded

    def __init__(
        self, decode: Callable[[RawRecords], DecodedBatch], wait: Callable[[float], bool] | None = None
    ) -> None:
        """Start the thread. `wait(seconds)` waits, and returns True early if this decoder is closed."""
        self._decode = decode
        self._closed = threading.Event()
        self._wait = self._closed.wait if wait is None else wait
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="decode")

    def decode(self, records: RawRecords) -> Future[DecodedBatch]:
        """Decode like `DeadLetters.decode`. Futures are done in the order of the calls.

        A batch that cannot be decoded now is tried again, at intervals of up to `RETRY_MAX_S`. Later batches wait.
        """
        return self._executor.submit(self._decode_patiently, records)

    def _decode_patiently(self, records: RawRecords) -> DecodedBatch:
        delay_s = RETRY_FIRST_S
        while True:
            try:
                decoded = self._decode(records)
            except RetryLater as exc:
                reason = short(str(exc) or "the task cannot decode now", MAX_REASON_CHARS)
                if reason != self.waiting_for:
                    log.warning("decoding_waits", reason=reason, action="trying again until it works")
                    self.waiting_for = reason
                if self._wait(delay_s):
                    raise
                delay_s = min(2 * delay_s, RETRY_MAX_S)
                continue
            if self.waiting_for:
                log.info("decoding_goes_on")
                self.waiting_for = ""
            return decoded

    def close(self) -> None:
        """Wait for the batches that are being decoded, and drop the other batches."""
        self._closed.set()
        self._executor.shutdown(wait=True, cancel_futures=True)
