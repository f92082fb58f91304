"""The process of `doll join`: it routes records into the join log, and joins partitions of the log.

Both happen in one loop with one transaction: packs of the log, samples, steps of the journal, and the offsets of what
was read. If a transaction fails, or another process takes a partition over, the state is made again from Kafka.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from doll.config import JobConfig
from doll.config.join import JoinConfig
from doll.errors import ConfigError, DataLossError, RecordError, ServiceUnavailableError
from doll.join.entries import Entries
from doll.join.extract import Headers
from doll.join.matcher import Decisions, Matcher
from doll.join.rocks_overflow import RocksOverflow, remove_leftovers
from doll.join.router import Input, Read, Router
from doll.join.watermarks import BrokerClock
from doll.kafka import topics
from doll.kafka.group_stream import AbandonedError, Committed, GroupStream, Output, Place, Run
from doll.kafka.joined_topics import JoinedTopic, joined_topics
from doll.kafka.publisher import Delivery, Publisher
from doll.kafka.range_reader import RangeReader
from doll.kafka.reader import has_finished, on_finish, unreadable_headers
from doll.kafka.samples_topic import ReplacedSamplesError, bounds_reaching, replaced_topic, short_log_message
from doll.process import metric_names as names
from doll.process.health import Heartbeat, heartbeat_of
from doll.process.signals import stop_requested
from doll.records.control import Metric
from doll.records.join_log import (
    MAX_PAYLOAD_BYTES,
    Pack,
    RefusedRecord,
    Step,
    decode_pack,
    decode_step,
    differences,
    encode,
    parse_restart,
)
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

# The open keys are many and refer to no cycles: looking through them took a sixth of the time.
_GC_OBJECTS: Final = 100_000
_MOST_MESSAGES: Final = 5_000
_BEGIN_AGAIN: Final = (
    "begin again under another job name, with topics that keep their records for longer than a joiner may be away"
)
_TICK_S: Final = 1.0
_TRIM_S: Final = 30.0
_LOOP_S: Final = 60.0
_PAUSE_S: Final = 1.0
_MAX_SKEW_MS: Final = 30_000
_CLOCK_S: Final = 5.0
_MAX_OUTPUT_BYTES: Final = 16 * 1024 * 1024


def run_joiner(
    config: JobConfig,
    services: Services,
    joiner: int,
    *,
    stop: threading.Event | None = None,
    until_finished: bool = True,
) -> int:
    """Join until `stop` is set, SIGTERM comes, or the job finishes. Return the exit code.

    Raises:
        ConfigError: the job has no `data.join`, or a joined topic cannot be used.
        ServiceUnavailableError: Kafka does not answer.
        FencedError: a later process has the number of this joiner.
        DataLossError: records of the join log, or of a joined topic, were deleted before they were joined.
    """
    join = config.data.join
    if join is None:
        raise ConfigError("the job file has no data.join: there is nothing to join")
    gc.set_threshold(_GC_OBJECTS, 50, 100)
    remove_leftovers()
    topics.ensure(config, services)
    inputs = joined_topics(config, services)
    with (
        stop_requested() if stop is None else contextlib.nullcontext(stop) as stopped,
        heartbeat_of(f"joiner-{joiner}", config) as heartbeat,
        on_finish(config, services, stopped.set) if until_finished else contextlib.nullcontext(),
        Publisher(config, services) as publisher,
    ):
        clock = BrokerClock()
        _send_metric(config, publisher, joiner, {}, clock)
        publisher.flush(_CLOCK_S)  # records are compared with the clock from the first one on
        if until_finished and has_finished(config, services, stopped.is_set):
            return 0
        while not stopped.is_set():
            session = _Session(config, join, services, joiner, inputs, publisher, clock)
            try:
                session.run(stopped, heartbeat)
            except AbandonedError as exc:
                log.warning("join_abandoned", reason=str(exc), hint="what was read is read again")
                stopped.wait(_PAUSE_S)
            finally:
                session.close()
        _send_metric(config, publisher, joiner, {names.LEFT: 1.0}, clock)
    return 0


def _send_metric(
    config: JobConfig, publisher: Publisher, joiner: int, values: dict[str, float], clock: BrokerClock
) -> None:
    """Send metrics. The time at which the broker writes them says how its clock differs from this machine's."""
    sent_ms = _now_ms()

    def note(delivery: Delivery) -> None:
        if delivery.refusal:
            log.error("kafka_refused", topic=delivery.topic, reason=delivery.refusal)
        elif delivery.time_ms >= 0:
            clock.note(sent_ms, delivery.time_ms, _now_ms())

    topic = config.topic("metrics")
    metric = Metric(source=names.joiner_source(joiner), values=values, time_s=sent_ms / 1000)
    publisher.try_send(topic, metric, on_delivery=None if topic in publisher.refusals else note)


@dataclass(slots=True)
class _JoinedPartition:
    """One partition of the log that this joiner joins. `until`: it has joined the log up to this offset."""

    matcher: Matcher
    until: int
    journal: int  # an offset of the journal that later steps do not come before
    pending: Decisions = field(default_factory=Decisions)
    changed: bool = False
    trimmed: int = 0


class _Session:
    """A membership in the group of joiners, until a transaction fails."""

    def __init__(
        self, config: JobConfig, join: JoinConfig, services: Services, joiner: int, inputs: tuple[JoinedTopic, ...],
        publisher: Publisher, clock: BrokerClock,
    ) -> None:  # fmt: skip
        self._config, self._join, self._services, self._joiner = config, join, services, joiner
        self._publisher, self._clock = publisher, clock
        self._partitions = {topic.source: topic.partitions for topic in inputs}
        self._names = [topic.name for topic in inputs]
        self._ids = {topic.name: topic.topic_id for topic in inputs}
        self._log, self._journal, self._samples = config.topic("join"), config.topic("joins"), config.topic("samples")
        count = config.data.num_partitions
        self._router = Router(join, count, config.data.max_record_bytes)
        self._joined: dict[int, _JoinedPartition] = {}
        self._behind: set[Input] = set()  # partitions that were said to be behind
        sections = (join.features, *join.labels)
        self._reads_headers = any(item.key.header or item.time.header for item in sections)
        self._counts = dict.fromkeys(names.JOINED_TOTALS, 0)
        self._initial: dict[Place, Committed] = {}  # first offsets that were not committed yet
        self._is_whole = True  # no transaction has failed: what is decided and not committed yet may be committed
        self._stream = GroupStream(
            config, services, "join", joiner, [*self._names, self._log], on_assigned=self._begin, on_revoked=self._end
        )

    def close(self) -> None:
        self._stream.close()
        for joined in self._joined.values():
            joined.matcher.close()

    def run(self, stopped: threading.Event, heartbeat: Heartbeat) -> None:
        """Join until `stopped` is set.

        Raises:
            AbandonedError: a transaction failed, and a new session must begin.
        """
        heartbeat.expect("loop", within_s=_LOOP_S)
        heartbeat.set_waiting_for("")
        try:
            self._loop(stopped, heartbeat)
            self._commit()
        except BaseException as exc:
            self._is_whole = False
            if isinstance(exc, DataLossError):
                self._check_topics()  # a topic that was made again is the reason, and a clearer one
            raise

    def _loop(self, stopped: threading.Event, heartbeat: Heartbeat) -> None:
        commit_s = tick_s = trim_s = time.monotonic()
        while not stopped.is_set():
            heartbeat.beat("loop")
            wait_s = max(commit_s - time.monotonic(), 0.0)
            size_bytes = 0
            runs = self._stream.poll(_MOST_MESSAGES, min(wait_s, 0.05))
            now_ms = self._now_ms()
            for run in runs:
                if run.topic == self._log:
                    for message in run.messages:
                        size_bytes += len(message.value() or b"")
                        self._join_pack(message)
                    continue
                read = self._read(run)
                size_bytes += sum(map(len, filter(None, read.values)))
                self._router.add(run.topic, run.partition, read, now_ms)
            now_s = time.monotonic()
            if now_s >= tick_s:
                tick_s = now_s + _TICK_S
                self._send_metrics()
                self._tick()
            if now_s >= commit_s or size_bytes > _MAX_OUTPUT_BYTES:
                commit_s = now_s + self._join.commit_every_s
                self._commit()
            if now_s >= trim_s:
                trim_s = now_s + _TRIM_S
                self._trim()
                self._check_topics()

    # --- partitions ---------------------------------------------------------------------------------------------------

    def _begin(self, committed: dict[Place, Committed]) -> dict[Place, int]:
        """Return where to begin to read each new partition, and make the state of those of the log."""
        begin: dict[Place, int] = {}
        with RangeReader(self._config, self._services) as reader:
            if any(known.offset < 0 for known in committed.values()):
                self._refuse_forgotten_offsets(reader)
            for (topic, partition), known in committed.items():
                offset = known.offset
                if offset < 0:
                    low, high = reader.bounds(topic, partition)
                    offset = high if topic != self._log and self._join.start == "latest" else low
                    self._initial[topic, partition] = Committed(offset, "")
                elif problem := self._changed(reader, topic, partition, known):
                    raise DataLossError(f"{problem}; {_BEGIN_AGAIN}")
                begin[topic, partition] = offset
                if topic == self._log:
                    self._joined[partition] = self._restored(reader, partition, offset, known.metadata)
                else:
                    self._router.begin(topic, partition, offset)
        log.info("join_assigned", partitions=[f"{topic}/{partition}" for topic, partition in sorted(begin)])
        return begin

    def _changed(self, reader: RangeReader, topic: str, partition: int, known: Committed) -> str:
        """Return why a partition cannot be read on from its committed offset; "": it can."""
        low, high = reader.bounds(topic, partition)
        if known.offset < low:
            where = f"topic {topic}, partition {partition}"
            return f"{where}: records {known.offset} to {low - 1} were deleted before they were joined"
        try:
            bounds_reaching(topic, partition, known.offset, reader.bounds)
        except ReplacedSamplesError:
            return short_log_message(topic, partition, known.offset, high)
        return ""

    def _refuse_forgotten_offsets(self, reader: RangeReader) -> None:
        """Raise DataLossError if Kafka has forgotten the offsets of the group: it would read all records once more."""
        partitions = range(self._config.data.num_partitions)
        begun = [at for at in partitions if any(self._steps(reader, at, *reader.bounds(self._journal, at)))]
        offsets = self._stream.committed([(self._log, at) for at in begun])
        if lost := sorted(place[1] for place, known in offsets.items() if known.offset < 0):
            raise DataLossError(
                f"Kafka has no committed offset for the partitions {lost} of {self._log}, which were joined before "
                "(offsets.retention.minutes has passed without a joiner, or the group was deleted); " + _BEGIN_AGAIN
            )

    def _check_topics(self) -> None:
        """Raise DataLossError if a joined topic was deleted and made again; if Kafka does not answer, look later."""
        with contextlib.suppress(ServiceUnavailableError):
            topics_now = joined_topics(self._config, self._services)
            self._refuse_replaced({topic.name: topic.topic_id for topic in topics_now})

    def _refuse_replaced(self, ids: Mapping[str, str]) -> None:
        """Raise DataLossError if a joined topic was deleted and made again. `ids`: Kafka's ids, by topic."""
        for name, topic_id in ids.items():
            if problem := replaced_topic(name, topic_id, self._ids[name]):
                raise DataLossError(f"{problem}; {_BEGIN_AGAIN}")

    def _restored(self, reader: RangeReader, partition: int, offset: int, metadata: str) -> _JoinedPartition:
        """Return the state of a partition of the log that has been joined up to `offset`."""
        entries = Entries(self._join.memory_bytes // max(1, self._config.data.num_partitions), RocksOverflow())
        matcher = Matcher(self._join, self._partitions, entries)
        end = self._stream.ends(self._journal, [partition])[partition]
        if metadata:
            restart = parse_restart(metadata)
            # Kafka deletes the group's offsets with a topic: only the log still knows that there was another one.
            self._refuse_replaced(dict(zip(self._names, restart.topics, strict=False)))
            began_s = time.monotonic()
            packs = self._packs(reader, partition, restart.offset, offset)
            matcher.restore(restart, packs, self._steps(reader, partition, restart.journal, end))
            log.info(
                "join_restored", partition=partition, keys=len(matcher), seconds=round(time.monotonic() - began_s, 2)
            )
        return _JoinedPartition(matcher, offset, end)

    def _packs(self, reader: RangeReader, partition: int, since: int, until: int) -> Iterator[tuple[int, Pack]]:
        low = reader.bounds(self._log, partition)[0]
        if low > since:
            raise DataLossError(
                f"topic {self._log}, partition {partition}: records {since} to {low - 1} were deleted, and with them "
                "open features and labels: begin again under another job name"
            )
        for offset, value in reader.read(self._log, partition, since, until):
            yield offset, decode_pack(value)

    def _steps(self, reader: RangeReader, partition: int, since: int, until: int) -> Iterator[Decisions]:
        for _, value in reader.read(self._journal, partition, since, until):
            step = decode_step(value)
            if step.restart:
                yield Decisions(settled=list(accumulate(step.settled)), kept=step.kept)

    def _end(self, places: list[Place], is_member: bool) -> None:
        """Commit all that was read, and forget these partitions, which others read from the committed offsets on.

        Raises:
            AbandonedError: it cannot be committed: a new session must begin, which forgets everything.
        """
        try:
            if self._is_whole and is_member:
                self._commit()
            elif self._is_whole and places:
                raise AbandonedError("the group has excluded this joiner")
        except BaseException:
            self._is_whole = False
            raise
        finally:
            self._forget(places)

    def _forget(self, places: list[Place]) -> None:
        for place in places:
            self._initial.pop(place, None)
        for topic, partition in places:
            if topic == self._log:
                if (joined := self._joined.pop(partition, None)) is not None:
                    joined.matcher.close()
            else:
                self._router.end(topic, partition)
                self._behind.discard((self._router.source_of(topic), partition))

    # --- records ------------------------------------------------------------------------------------------------------

    def _read(self, run: Run) -> Read:
        headers: list[Headers] = []
        if self._reads_headers:
            without = unreadable_headers(run.messages)
            headers = [() if at in without else item.headers() or () for at, item in enumerate(run.messages)]
        return Read(run.offsets, run.values(), run.keys(), run.timestamps(), headers)

    def _join_pack(self, message: object) -> None:
        partition, offset = message.partition(), message.offset()  # type: ignore[attr-defined]
        joined = self._joined[partition]
        try:
            pack = decode_pack(message.value())  # type: ignore[attr-defined]
        except RecordError as exc:
            raise ConfigError(f"topic {self._log}, partition {partition}, offset {offset}: {exc}") from exc
        joined.matcher.feed(pack, offset, joined.journal, joined.pending)
        joined.until = offset + 1
        joined.changed = True

    def _tick(self) -> None:
        """Note up to which time the partitions have been read, by the broker's clock."""
        if abs(self._clock.correction_ms) > _MAX_SKEW_MS:
            log.warning(
                "clock_differs", seconds=self._clock.correction_ms / 1000,
                hint="this machine's clock is not the broker's, which the joiner goes by: set the clock",
            )  # fmt: skip
        now_ms = self._now_ms()
        read = self._stream.read_until(self._names, now_ms)
        times_ms = {(self._router.source_of(topic), at): time_ms for (topic, at), time_ms in read.items()}
        newest_ms = max((joined.matcher.watermarks.newest_ms() for joined in self._joined.values()), default=-1)
        behind = set(self._router.read_until(times_ms, now_ms, newest_ms))
        for source, partition in sorted(behind - self._behind):
            log.warning(
                "event_time_behind", topic=self._names[source], partition=partition,
                hint="its events are more than a window older than others: windows do not wait for its clock",
            )  # fmt: skip
        self._behind |= behind

    def _send_metrics(self) -> None:
        open_keys = sum(len(joined.matcher) for joined in self._joined.values())
        values = {name: float(value) for name, value in self._counts.items()} | {
            names.OPEN_KEYS: float(open_keys),
            "partitions_behind": float(len(self._behind)),
            "clock_correction_s": self._clock.correction_ms / 1000,
        }
        _send_metric(self._config, self._publisher, self._joiner, values, self._clock)
        self._publisher.poll()

    def _commit(self) -> None:
        """Write all that has been decided, in one transaction."""
        now_ms = self._now_ms()
        packs = self._router.take(now_ms)
        changed = {partition: joined for partition, joined in self._joined.items() if joined.changed}
        refused, self._router.refused = self._router.refused, []
        if not packs and not changed and not refused and not self._initial:
            return
        offsets = dict(self._initial)
        for (source, partition), offset in self._router.next_offsets.items():
            offsets[self._names[source], partition] = Committed(offset, "")
        steps = []
        for partition, joined in changed.items():
            restart = joined.matcher.restart(joined.until, joined.journal)._replace(topics=tuple(self._ids.values()))
            offsets[self._log, partition] = Committed(joined.until, restart.text())
            steps.append((partition, self._step(joined, restart.text(), now_ms)))
        if refused:
            steps.append((0, Step(until=0, joiner=self._joiner, now_ms=now_ms, refused=refused)))
        self._stream.commit(self._outputs(packs, changed, steps), offsets)
        self._initial.clear()
        for joined in changed.values():
            done, joined.pending, joined.changed = joined.pending, Decisions(), False
            self._counts["samples_total"] += len(done.samples) - done.corrections
            self._counts["corrections_total"] += done.corrections
            self._counts["dropped_total"] += len(done.dropped)
            self._counts["refused_total"] += len(done.refused)
        self._counts["refused_total"] += len(refused)

    def _outputs(
        self, packs: list[tuple[int, Pack]], changed: dict[int, _JoinedPartition], steps: list[tuple[int, Step]]
    ) -> Iterator[Output]:
        for partition, pack in packs:
            yield Output(self._log, partition, encode(pack))
        samples = self._samples
        for partition, joined in changed.items():
            for sample in joined.pending.samples:
                yield Output(samples, partition, sample.value, sample.features.key)
        for partition, step in steps:
            yield Output(self._journal, partition, encode(step), None, self._note_offset(partition))

    def _note_offset(self, partition: int) -> Callable[[int], None]:
        def note(offset: int) -> None:
            if (joined := self._joined.get(partition)) is not None:
                joined.journal = max(joined.journal, offset + 1)

        return note

    def _step(self, joined: _JoinedPartition, restart: str, now_ms: int) -> Step:
        done, marks = joined.pending, joined.matcher.watermarks
        features_ms, labels_ms = marks.features_ms(), marks.labels_ms()
        return Step(
            until=joined.until, joiner=self._joiner, now_ms=now_ms, restart=restart,
            settled=differences(done.settled), kept=done.kept,
            dropped=[(record.partition, record.offset) for record in done.dropped],
            refused=[
                RefusedRecord(
                    item.record.source, item.record.partition, item.record.offset, item.record.time_ms, item.record.key,
                    item.record.value[:MAX_PAYLOAD_BYTES], item.code, item.reason,
                )
                for item in done.refused
            ],
            samples=len(done.samples) - done.corrections, corrections=done.corrections, open=len(joined.matcher),
            features_ms=-1 if features_ms is None else features_ms, labels_ms=-1 if labels_ms is None else labels_ms,
        )  # fmt: skip

    def _trim(self) -> None:
        """Delete the records of the log that no restart reads."""
        for partition, joined in self._joined.items():
            offset = joined.matcher.restart(joined.until, joined.journal).offset
            if not joined.changed and offset > joined.trimmed:
                topics.delete_records(self._config, self._services, self._log, partition, offset)
                joined.trimmed = offset

    def _now_ms(self) -> int:
        return _now_ms() + self._clock.correction_ms


def _now_ms() -> int:
    return int(1000 * time.time())
