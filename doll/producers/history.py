"""The producer of a source of kind history: it sends the rows of a table, and then the records of a topic, each once.

All that it sends is in transactions, each with the state from which a restart continues. A later producer of the job
ends the open transaction of an earlier one, and fences it. The audit shows that each row and record is one sample.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from doll.config import HistorySource, JobConfig
from doll.errors import ConfigError, DataLossError, ServiceUnavailableError
from doll.extras import lacking
from doll.kafka import topics
from doll.kafka.group_stream import AbandonedError, Output, TopicFeed, TransactionalWriter
from doll.kafka.joined_topics import check_topic
from doll.kafka.range_reader import RangeReader
from doll.kafka.samples_topic import SampleLog, at_time
from doll.kafka.worker_offsets import count_unlearned
from doll.process import metric_names as names
from doll.process.health import Heartbeat
from doll.producers import handover
from doll.producers.handover import ORIGIN, SNAPSHOT, STATES, Overlap, Refused, Snapshot, State, identity, stream_of
from doll.producers.sender import SampleSender
from doll.records.bounded import short
from doll.services import Services
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.producers.sources.history_tables import HistoryTable

log = get_logger(__name__)

_ROWS: Final = 4096  # rows that are converted together
_COMMIT_S: Final = 0.5  # interval of transactions while rows are sent
_TOPIC_COMMIT_S: Final = 0.1
_REPORT_S: Final = 1.0
_TRIM_S: Final = 30.0
_BACKLOG_S: Final = 5.0  # interval of looking how far the workers are
_LOOP_S: Final = 300.0  # limit for one row group, which may come from afar
_MOST_MESSAGES: Final = 5_000
_NEWEST: Final = 64  # states at the end of their partition that are searched first
_YEAR_2000_US: Final = 946_684_800_000_000
_DAY_US: Final = 86_400_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def read_snapshot(config: JobConfig, reader: RangeReader) -> Snapshot | None:
    """Return the snapshot of the history; None if the job has not begun."""
    topic = config.topic("history")
    for _, value in reader.read(topic, SNAPSHOT, *reader.bounds(topic, SNAPSHOT)):
        if isinstance(found := handover.decode(value), Snapshot):
            return found
    return None


def read_state(config: JobConfig, reader: RangeReader) -> State:
    """Return the state of the last transaction. Raise DataLossError if it was deleted."""
    topic, width = config.topic("history"), _NEWEST
    low, high = reader.bounds(topic, STATES)
    while True:
        values = [value for _, value in reader.read(topic, STATES, max(low, high - width), high)]
        if values and isinstance(state := handover.decode(values[-1]), State):
            return state
        if high - width <= low:
            raise DataLossError(f"topic {topic} has lost the state of the history: begin again under another job name")
        width *= 8


def send_history(
    config: JobConfig, services: Services, sender: SampleSender, stopped: threading.Event, heartbeat: Heartbeat,
    say: Callable[[str], None],
) -> bool:  # fmt: skip
    """Send until `stopped` is set or `source.limit_samples` are sent. Return whether this limit is reached.

    Raises:
        ConfigError: the table or the topic cannot be used, or was changed.
        DataLossError: records after the end of the history were deleted before they were read.
        ServiceUnavailableError, FencedError: see `TransactionalWriter`.
    """
    heartbeat.expect("loop", within_s=_LOOP_S)
    heartbeat.set_waiting_for("")
    while not stopped.is_set():
        # A later process has this name too: from here on, nothing of an earlier one is committed.
        writer = TransactionalWriter(config, services, f"doll.{config.job}.history")
        try:
            return _Sending(config, services, writer, sender, stopped, heartbeat, say).run()
        except AbandonedError as exc:
            log.warning("history_abandoned", reason=str(exc), hint="what was not committed is sent again")
            stopped.wait(1.0)
        finally:
            writer.close()
    return False


class _Sending:
    """Sends until a transaction fails."""

    def __init__(
        self, config: JobConfig, services: Services, writer: TransactionalWriter, sender: SampleSender,
        stopped: threading.Event, heartbeat: Heartbeat, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        assert isinstance(config.source, HistorySource)
        self._config, self._services, self._source = config, services, config.source
        self._writer, self._sender = writer, sender
        self._stopped, self._heartbeat, self._say = stopped, heartbeat, say
        self._samples, self._own = config.topic("samples"), config.topic("history")
        self._streams, self._most_bytes = config.data.num_partitions, config.data.max_record_bytes + 1
        self._limit = config.source.limit_samples or 1 << 62
        self._overlap_us = round(1e6 * (config.source.handover.overlap_s or 0))  # 0: offsets tell
        self._topic = check_topic(config, services, config.source.topic, "source.topic")
        with RangeReader(config, services) as reader:
            self._bounds = [reader.bounds(self._topic.name, number) for number in range(self._topic.partitions)]
            known = read_snapshot(config, reader)
            self._table = self._open(None) if known is None else None
            self._snapshot = known or self._begin()
            self._state = State(offsets=self._snapshot.begin) if known is None else read_state(config, reader)
        if self._snapshot.topic_id != self._topic.topic_id:
            raise ConfigError(f"source.topic: topic {self._topic.name} was deleted and created again")
        self._kept, self._kept_at = self._state, 0
        self._committed_s = self._reported_s = self._trimmed_s = self._backlog_due_s = time.monotonic()
        self._reported, self._said = self._sent, -1
        if known is None:
            self._writer.write([Output(self._own, SNAPSHOT, handover.encode(self._snapshot))])
            self._commit()

    def run(self) -> bool:
        if self._state.rows < self._snapshot.rows:
            self._send_rows(self._table or self._open(self._snapshot))
        if self._goes_on():
            self._forward()
        self._report()
        return self._sent >= self._limit

    # --- the beginning ------------------------------------------------------------------------------------------------

    def _open(self, known: Snapshot | None) -> HistoryTable:
        try:
            from doll.producers.sources.history_tables import HistoryTable
        except ImportError as exc:
            raise lacking("source.kind: history", "parquet") from exc
        path = self._source.table
        if "://" not in path:
            path = str(self._config.path(Path(path)).resolve())
        if known is None:
            return HistoryTable(self._source, path)
        table = HistoryTable(self._source, path, [file.name for file in known.files], known.version)
        if problem := handover.changed(known, table.files):
            raise ConfigError(f"source.table: {problem}: restore it, or begin again under another job name")
        return table

    def _begin(self) -> Snapshot:
        """Find where the table ends in the topic."""
        table = self._table
        assert table is not None
        now_us = int(time.time() * 1e6)
        if not _YEAR_2000_US < table.end_us < now_us + _DAY_US:
            latest = _EPOCH + timedelta(microseconds=max(0, min(table.end_us, 1 << 57)))
            raise ConfigError(f"source.time: the latest time in the table is {latest:%Y-%m-%d}: correct the unit")
        if not self._overlap_us:
            begin = handover.begin_after(table.last_offsets(), self._bounds)
        else:
            begin = self._offsets_at(table.end_us - self._overlap_us)
        gap = handover.find_gap(begin, self._bounds, by_time=self._overlap_us > 0)
        if gap and self._config.data.on_data_loss == "stop":
            raise DataLossError(f"topic {self._topic.name}, {gap}: write a table that ends later, or begin again")
        if gap:
            log.warning("history_gap", topic=self._topic.name, gap=gap)
            begin = tuple(max(at, low) for at, (low, _) in zip(begin, self._bounds, strict=True))
        self._say(f"history: {table.rows} rows in {len(table.files)} files, then topic {self._topic.name} from {begin}")
        return Snapshot(table.version, table.files, table.rows, table.end_us, self._topic.topic_id, begin)

    def _offsets_at(self, time_us: int) -> tuple[int, ...]:
        known = SampleLog(self._topic.name, "", *zip(*self._bounds, strict=True))
        return at_time(self._config, self._services, known, time_us // 1000)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _send_rows(self, table: HistoryTable) -> None:
        with ThreadPoolExecutor(1) as pool:
            chunks = table.chunks(self._state.piece, self._state.base)
            following = pool.submit(next, chunks, None)
            while self._goes_on():
                if not wait([following], _COMMIT_S).done:
                    self._tick(_COMMIT_S)
                    continue
                if (chunk := following.result()) is None:
                    break
                following = pool.submit(next, chunks, None)
                piece, base, rows = chunk
                self._state = msgspec.structs.replace(self._state, piece=piece, base=base)
                self._send_chunk(table, base, rows)
            self._commit()

    def _send_chunk(self, table: HistoryTable, base: int, rows: Any) -> None:
        for at in range(self._state.rows - base, len(rows), _ROWS):
            if not self._goes_on():
                return
            block = rows.slice(at, min(_ROWS, self._limit - self._sent))
            row = base + at
            self._writer.write(
                Output(self._samples, number % self._streams, value, headers=[(ORIGIN, b"%d" % number)])
                for number, value in enumerate(table.values(block, self._most_bytes), row)
            )
            self._state = msgspec.structs.replace(self._state, rows=row + len(block))
            self._tick(_COMMIT_S)
            self._wait_for_workers()

    def _wait_for_workers(self) -> None:
        """Wait while the workers are too far behind."""
        limit = self._source.max_unlearned
        if limit is None or time.monotonic() < self._backlog_due_s:
            return
        is_late, unlearned = False, self._count_unlearned()
        while unlearned > (0.9 if is_late else 1.0) * limit and self._goes_on():
            if not is_late:
                self._commit()
                log.info("history_waits", unlearned=unlearned, limit=limit, hint="source.max_unlearned")
            is_late = True
            self._heartbeat.set_waiting_for(f"workers: {unlearned} records are not learned yet")
            self._stopped.wait(_REPORT_S)
            self._tick(_COMMIT_S)
            unlearned = self._count_unlearned()
        if is_late:
            self._heartbeat.set_waiting_for("")
        self._backlog_due_s = time.monotonic() + _BACKLOG_S

    def _count_unlearned(self) -> int:
        """Return how many records are not learned; 0 if Kafka does not say, because the audit finds what is lost."""
        try:
            return count_unlearned(self._config, self._services)
        except ServiceUnavailableError as exc:
            log.warning("workers_not_seen", reason=str(exc))
            return 0

    # --- the topic ----------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        """Send what the topic has from the end of the history on."""
        offsets = list(self._state.offsets)
        overlap = self._overlap(offsets)
        since_us = Overlap.since_us(self._snapshot.end_us, self._overlap_us)
        offsets += [0] * (self._topic.partitions - len(offsets))  # partitions that were added
        if gap := handover.find_gap(offsets, self._bounds):
            raise DataLossError(f"topic {self._topic.name}, {gap}: begin again under another job name")
        partitions, streams, samples = len(self._snapshot.begin), self._streams, self._samples
        feed = TopicFeed(self._config, self._services, self._topic.name, offsets)
        try:
            while self._goes_on():
                state = self._state
                forwarded, in_history, refused = state.forwarded, state.in_history, state.refused
                outputs: list[Output] = []
                for message in feed.poll(min(_MOST_MESSAGES, self._limit - self._sent), _TOPIC_COMMIT_S / 2):
                    partition, offset, value = message.partition(), message.offset(), message.value()
                    offsets[partition] = offset + 1
                    if overlap is not None and overlap.is_open(partition, 1000 * message.timestamp()[1]):
                        known = self._identity(value, since_us)
                        if isinstance(known, str):
                            refusal = handover.encode(Refused(partition, offset, known))
                            outputs.append(Output(self._own, SNAPSHOT, refusal))
                            refused += 1
                            continue
                        if overlap.takes(known):
                            in_history += 1
                            continue
                    forwarded += 1
                    cut = value[: self._most_bytes] if value else value
                    origin = ORIGIN, b"%d %d" % (partition, offset)
                    stream = stream_of(partition, offset, partitions, streams)
                    outputs.append(Output(samples, stream, cut, message.key(), headers=[origin]))
                self._writer.write(outputs)
                over = state.over if overlap is None else tuple(at for at in sorted(overlap.over) if at < partitions)
                self._state = State(
                    state.rows, state.piece, state.base, tuple(offsets), forwarded, in_history, refused, over
                )
                self._tick(_TOPIC_COMMIT_S)
            self._commit()
        finally:
            feed.close()

    def _overlap(self, offsets: list[int]) -> Overlap | None:
        """Return the overlap at the end of the last transaction; None: the history has no further record."""
        snapshot = self._snapshot
        if not self._overlap_us or len(self._state.over) == len(snapshot.begin):
            return None
        since_us = Overlap.since_us(snapshot.end_us, self._overlap_us)
        table = self._table or self._open(snapshot)
        overlap = Overlap(snapshot.end_us, self._overlap_us, table.identities(since_us))
        with RangeReader(self._config, self._services) as reader:
            # What arrived before the overlap is in the history, so it takes rows of its identity.
            for first, until in ((self._offsets_at(since_us), snapshot.begin), (snapshot.begin, offsets)):
                for partition, (begin, end) in enumerate(zip(first, until, strict=False)):
                    for message in reader.messages(self._topic.name, partition, begin, end):
                        if not overlap.is_open(partition, round(1e6 * message.written_s)):
                            break
                        if isinstance(known := self._identity(message.value, since_us), int):
                            overlap.takes(known)
        # Partitions that were added are younger than the table.
        overlap.over.update(self._state.over, range(len(snapshot.begin), self._topic.partitions))
        return overlap

    def _identity(self, value: bytes | None, since_us: int) -> int | str:
        """Return the identity of a record, or the reason why it has none."""
        source = self._source
        try:
            key, at = _fields(source.handover.key or "", source.time.field or "")(value or b"")
            if isinstance(at, datetime):
                time_us = (at - _EPOCH) // timedelta(microseconds=1)
            else:
                factor = handover.US_PER_UNIT[source.time.unit]
                time_us = round(at * factor) if isinstance(at, float) else at * factor
                time_us = time_us // 1000 if source.time.unit == "ns" else time_us
        except (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError) as exc:
            return f"expected a JSON object with the key and the time: {short(exc)}"
        return identity(key, time_us) if time_us >= since_us else "older than handover.overlap_s allows"

    # --- both ---------------------------------------------------------------------------------------------------------

    @property
    def _sent(self) -> int:
        return self._state.rows + self._state.forwarded

    def _goes_on(self) -> bool:
        return not self._stopped.is_set() and self._sent < self._limit

    def _commit(self) -> None:
        note = functools.partial(setattr, self, "_kept_at")
        self._writer.write([Output(self._own, STATES, handover.encode(self._state), on_offset=note)])
        self._writer.commit()
        self._kept, self._committed_s = self._state, time.monotonic()

    def _tick(self, every_s: float) -> None:
        """Commit, report and trim what is due."""
        now_s = time.monotonic()
        self._heartbeat.beat("loop")
        if now_s - self._committed_s >= every_s and self._state != self._kept:
            self._commit()
        if now_s - self._reported_s >= _REPORT_S:
            self._report()
        if now_s - self._trimmed_s >= _TRIM_S:
            self._trimmed_s = now_s
            self._commit()
            topics.delete_records(self._config, self._services, self._own, STATES, self._kept_at)
            topic = check_topic(self._config, self._services, self._topic.name, "source.topic")
            if topic.partitions > self._topic.partitions:
                raise AbandonedError(f"topic {topic.name} has more partitions than before")

    def _report(self) -> None:
        now_s, state, total = time.monotonic(), self._state, self._snapshot.rows
        rate = (self._sent - self._reported) / max(now_s - self._reported_s, 1e-3)
        self._reported_s, self._reported = now_s, self._sent
        left_s = (total - state.rows) / rate if rate else 0.0
        values = {
            names.DELIVERED_TOTAL: self._sent, names.RATE_PER_S: rate, names.HISTORY_ROWS: state.rows,
            names.HISTORY_TOTAL: total, names.HISTORY_LEFT_S: left_s,
        }  # fmt: skip
        self._sender.send_metric({name: float(value) for name, value in values.items()}, time.time())
        self._sender.poll()
        if (tenth := 10 * state.rows // total) != self._said:
            self._said = tenth
            self._say(f"history: {state.rows} of {total} rows, {rate:.0f} rows/s, {left_s:.0f} s left")


@functools.cache
def _fields(key: str, at: str) -> Callable[[bytes], tuple[Any, Any]]:
    """Return a function that reads a key and a time from a JSON object."""
    fields: list[Any] = [("key", str | int), ("at", int | float | datetime)]
    kind = msgspec.defstruct("Fields", fields, rename={"key": key, "at": at})
    decode = msgspec.json.Decoder(kind).decode
    return lambda value: msgspec.structs.astuple(decode(value))


@dataclass(slots=True)
class HistoryReport:
    """The result of the audit. `problems`: one sentence each; none if the audit passes."""

    rows: int = 0
    total_rows: int = 0
    forwarded: int = 0
    in_history: int = 0
    refused: int = 0
    deleted: int = 0  # samples that retention has deleted, which the audit cannot check
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def text(self) -> str:
        line = (
            f"history: {self.rows} rows of {self.total_rows} sent; topic: {self.forwarded} records sent, "
            f"{self.in_history} in the history, {self.refused} refused; {self.deleted} samples deleted since"
        )
        return "\n".join([line, *(f"PROBLEM: {problem}" for problem in self.problems)])


def audit_history(config: JobConfig, services: Services) -> HistoryReport:
    """Audit the history of a job from its topics. Reads only; needs a byte for each row and record.

    Raises:
        ConfigError: the job has sent nothing yet.
        ServiceUnavailableError: Kafka does not answer.
    """
    assert isinstance(config.source, HistorySource)
    topic, samples = config.source.topic, config.topic("samples")
    with RangeReader(config, services) as reader:
        if (snapshot := read_snapshot(config, reader)) is None:
            raise ConfigError(f"job {config.job} has sent nothing of its history yet")
        state = read_state(config, reader)  # before the samples, which may go further
        bounds = [reader.bounds(topic, partition) for partition in range(len(state.offsets))]
        begin = [*snapshot.begin, *[0] * (len(bounds) - len(snapshot.begin))]
        rows = np.zeros(snapshot.rows, np.uint8)
        records = [np.zeros(max(0, high - first), np.uint8) for first, (_, high) in zip(begin, bounds, strict=True)]
        report = HistoryReport(state.rows, snapshot.rows, state.forwarded, state.in_history, state.refused)
        for stream in range(config.data.num_partitions):
            low, high = reader.bounds(samples, stream)
            report.deleted += low
            for message in reader.messages(samples, stream, low, high):
                # A sample that `doll dead replay` has written again has no origin.
                for value in (value for name, value in message.headers if name == ORIGIN and value):
                    try:
                        *place, at = map(int, value.split())
                        if not place:
                            rows[at] += rows[at] < 2
                        elif place[0] < len(records) and (index := at - begin[place[0]]) < len(records[place[0]]):
                            records[place[0]][index] += records[place[0]][index] < 2
                    except (ValueError, IndexError):
                        report.problems.append(f"{samples}/{stream}, offset {message.offset}: no origin: {value!r:.60}")
        missing = int((rows[: state.rows] == 0).sum())
        twice = int((rows > 1).sum()) + sum(int((of > 1).sum()) for of in records)
        absent, unknown = 0, False
        for partition, (first, until, of) in enumerate(zip(begin, state.offsets, records, strict=True)):
            unknown = unknown or bounds[partition][0] > first
            for offset, _ in reader.read(topic, partition, max(first, bounds[partition][0]), until):
                absent += not of[offset - first]
    if twice:
        report.problems.append(f"{twice} rows or records are in more than one sample")
    unexplained = absent - state.in_history - state.refused
    if missing + max(0, unexplained) > report.deleted or (unexplained < 0 and not unknown):
        report.problems.append(f"{missing} rows and {unexplained} records of topic {topic} are in no sample")
    return report
