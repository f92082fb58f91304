"""Dead letters, for people: which records could not be learned and why, and putting them into the stream again.

A record is dead only if the durable model's updates say so. Its letter alone does not: a batch that was not durable
when its worker died is decoded again, perhaps by a corrected task, and what was refused before is then learned; that
letter is superseded. A letter beyond the newest checkpoint is pending: it may still turn out either way.

A record is replayed as a new record at the end of its partition, and a letter says so (`replayed as offset n`). Both
are written in one transaction, so that no crash, and no second replay at the same time, replays a record twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from doll.errors import ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.clients import kafka_settings
from doll.kafka.range_reader import RangeReader
from doll.ledger.audit import build_ledger
from doll.ledger.balance import OffsetState
from doll.records import DeadLetter, encode
from doll.services import Services

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.storage.checkpoints import CheckpointStore

_REPLAYED: Final = re.compile(r"replayed as offset (\d+)")
_FLUSH_S: Final = 30.0
_RECORDS_PER_TRANSACTION: Final = 500  # records of one transaction


State = Literal["dead", "replayed", "superseded", "in part", "pending"]


@dataclass(frozen=True)
class DeadRecord:
    """One record that could not be learned, wholly or in part, when somebody tried.

    Attributes:
        letter: the newest word on it from a worker; of a record that is dead, the newest that refuses all of it.
        replayed_as: the offsets at which it was put into the stream again, in the same partition.
        offset_state: what became of its offset in the durable model.
    """

    letter: DeadLetter
    replayed_as: tuple[int, ...] = ()
    offset_state: OffsetState = "pending"

    @property
    def state(self) -> State:
        """`dead`, and perhaps `replayed`; `superseded`: learned since; `in part`: its other samples are learned;
        `pending`: not in a checkpoint yet."""
        match self.offset_state:
            case "pending":
                return "pending"
            case "dead" | "absent":
                return "replayed" if self.replayed_as else "dead"
            case "partly" if not self.letter.whole:
                return "in part"
        return "superseded"

    @property
    def at(self) -> tuple[int, int]:
        """Partition and offset."""
        return self.letter.partition, self.letter.offset

    @property
    def payload_is_whole(self) -> bool:
        return len(self.letter.payload) == self.letter.payload_bytes


@dataclass(frozen=True)
class Replay:
    """What was done about one dead record, or would be.

    Attributes:
        source: where its bytes come from: the samples topic or the letter; None where it is not replayed.
        value: the bytes; None where it is not replayed.
        offset: its new place in the partition; None where it was not sent.
        skip_reason: why it is not replayed; "" where it is.
    """

    dead: DeadRecord
    source: Literal["topic", "letter"] | None = None
    value: bytes | None = None
    offset: int | None = None
    skip_reason: str = ""


def dead_records(
    config: JobConfig,
    services: Services,
    store: CheckpointStore,
    *,
    reason: str = "",
    at: Sequence[tuple[int, int]] = (),
) -> list[DeadRecord]:
    """The records that letters tell of, by partition and offset. Reads only.

    Args:
        store: its newest checkpoint says how far the durable model reaches.
        reason: only those whose reason contains this text, in any case.
        at: only those at these partitions and offsets; empty: all.

    Raises:
        ServiceUnavailableError: Kafka does not answer, or the job has no topics there.
        CheckpointError: the checkpoint cannot be read.
    """
    topics.check(config, services)
    checkpoint = store.load_newest(None)
    with RangeReader(config, services) as reader:
        ledger, own = build_ledger(config, reader, checkpoint)
        letters = own.letters(reader.records(config.topic("dead"), (DeadLetter,)))
        return collect(letters, ledger.offset_state, reason=reason, at=at)


def collect(
    letters: Iterable[DeadLetter],
    offset_state: Callable[[int, int], OffsetState],
    *,
    reason: str = "",
    at: Sequence[tuple[int, int]] = (),
) -> list[DeadRecord]:
    """One `DeadRecord` for each record that letters tell of, by partition and offset. Pure.

    Args:
        letters: in the order of the topic.
        offset_state: of a partition and offset in the durable model.
    """
    newest: dict[tuple[int, int], DeadLetter] = {}
    newest_whole: dict[tuple[int, int], DeadLetter] = {}
    replayed: dict[tuple[int, int], tuple[int, ...]] = {}
    for letter in letters:
        key = (letter.partition, letter.offset)
        if at and key not in at:
            continue
        if (match := _REPLAYED.fullmatch(letter.reason)) is not None and not letter.payload:
            replayed[key] = (*replayed.get(key, ()), int(match[1]))
            continue
        newest[key] = letter
        if letter.whole:
            newest_whole[key] = letter
    found = []
    for key in sorted(newest):
        known = offset_state(*key)
        letter = newest_whole.get(key, newest[key]) if known in ("dead", "absent") else newest[key]
        found.append(DeadRecord(letter, replayed.get(key, ()), known))
    return [dead for dead in found if reason.lower() in dead.letter.reason.lower()]


def replay(
    config: JobConfig, services: Services, chosen: Sequence[DeadRecord], *, dry_run: bool = False, again: bool = False
) -> list[Replay]:
    """Put dead records into the stream again, each at the end of its partition, in their order.

    Args:
        chosen: as `dead_records` found them; only those that are dead are replayed.
        dry_run: say what would be done, send nothing.
        again: also those that were replayed before.

    Raises:
        ServiceUnavailableError: Kafka does not answer, does not take a record, or another replay has begun since. What
            is in the stream by then has its letter.
    """
    if dry_run:
        return _planned(config, services, chosen, again)
    with _Replayer(config, services) as replayer:
        # Again: another replay may have put some of them back since `chosen` was read.
        with RangeReader(config, services) as reader:
            letters = reader.records(config.topic("dead"), (DeadLetter,))
            now = {dead.at: dead.replayed_as for dead in collect(letters, lambda partition, offset: "dead")}
        chosen = [dataclasses.replace(dead, replayed_as=now.get(dead.at, dead.replayed_as)) for dead in chosen]
        planned = _planned(config, services, chosen, again)
        sending = [item for item in planned if item.value is not None]
        sent = {
            item.dead.at: item
            for at in range(0, len(sending), _RECORDS_PER_TRANSACTION)
            for item in replayer.send(sending[at : at + _RECORDS_PER_TRANSACTION])
        }
    return [sent.get(item.dead.at, item) for item in planned]


def _planned(config: JobConfig, services: Services, chosen: Sequence[DeadRecord], again: bool) -> list[Replay]:
    found = []
    with RangeReader(config, services) as reader:
        for dead in chosen:
            skip_reason = _skip_reason(config, dead, again)
            found.append(Replay(dead, skip_reason=skip_reason) if skip_reason else _with_payload(config, reader, dead))
    return found


def _skip_reason(config: JobConfig, dead: DeadRecord, again: bool) -> str:
    letter = dead.letter
    if not 0 <= letter.partition < config.data.workers:
        return f"it names partition {letter.partition}, the job has {config.data.workers}"
    match dead.state:
        case "pending":
            return "its batch is not in a checkpoint yet, and may still be learned: try again later"
        case "superseded":
            return "superseded: it was learned when its batch was computed again, and would be learned twice"
        case "in part":
            return "the other samples of its packed record are learned, and would be learned twice"
    if not letter.whole:
        return "no letter refuses all of its packed record"
    if letter.payload_bytes == 0:
        return "it is empty"
    if dead.replayed_as and not again:
        return f"replayed before, as offset {', '.join(map(str, dead.replayed_as))} (--again to do it once more)"
    return ""


def _with_payload(config: JobConfig, reader: RangeReader, dead: DeadRecord) -> Replay:
    letter = dead.letter
    low, _ = reader.bounds(config.topic("samples"), letter.partition)
    if letter.offset >= low:
        for offset, value in reader.read(config.topic("samples"), letter.partition, letter.offset, letter.offset + 1):
            if offset == letter.offset and value:
                return Replay(dead, "topic", value)
    if dead.payload_is_whole:
        return Replay(dead, "letter", letter.payload)
    return Replay(
        dead,
        skip_reason="the samples topic no longer holds it, and the letter kept only the first "
        f"{len(letter.payload)} of {letter.payload_bytes} bytes",
    )


class _Replayer:
    """Puts records and their letters into Kafka, in transactions: both are there, or neither is.

    Of two replays of a job at a time the later one goes on, and what the earlier one had left open is taken back.
    """

    def __init__(self, config: JobConfig, services: Services) -> None:
        from confluent_kafka import Producer

        self._config, self._services = config, services
        self._name = f"doll-{config.job}-replay"
        self._producer = Producer(
            kafka_settings(
                config, services, acks="all", enable_idempotence=True, transactional_id=self._name,
                transaction_timeout_ms=int(_FLUSH_S * 1000), message_timeout_ms=int(_FLUSH_S * 1000),
                message_max_bytes=32 * 1024 * 1024,
            )
        )  # fmt: skip

    def __enter__(self) -> _Replayer:
        with self._translate_errors("start a transaction"):
            self._producer.init_transactions(2 * _FLUSH_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._producer.purge()

    def send(self, items: Sequence[Replay]) -> list[Replay]:
        """Send some records, each with its letter; when this returns, everybody can read them.

        Raises:
            ServiceUnavailableError: Kafka does not take them. None of them is in the stream then.
        """
        from confluent_kafka import KafkaException

        samples, dead = self._config.topic("samples"), self._config.topic("dead")
        with self._translate_errors("take records"):
            self._producer.begin_transaction()
            try:
                places = [(samples, item.dead.letter.partition, item.value or b"") for item in items]
                done = [
                    dataclasses.replace(item, offset=offset)
                    for item, offset in zip(items, self._deliver(places), strict=True)
                ]
                (*_, last) = self._deliver([(dead, 0, encode(_replay_letter(item))) for item in done])
                self._producer.commit_transaction(2 * _FLUSH_S)
            except (KafkaException, ServiceUnavailableError):
                with contextlib.suppress(KafkaException):
                    self._producer.purge()
                    self._producer.abort_transaction(_FLUSH_S)
                raise
        self._await_end(dead, last)
        return done

    def _deliver(self, records: Sequence[tuple[str, int, bytes]]) -> list[int]:
        """The offsets of records (topic, partition, value), which Kafka has when this returns."""
        offsets: dict[int, int] = {}
        refused: list[str] = []

        def delivered(at: int, error: Any, message: Any) -> None:
            if error is None:
                offsets[at] = int(message.offset())
            else:
                refused.append(f"Kafka does not take a record on {records[at][0]}, partition {records[at][1]}: {error}")

        for at, (topic, partition, value) in enumerate(records):
            self._producer.produce(topic, value, partition=partition, on_delivery=functools.partial(delivered, at))
        self._producer.flush(_FLUSH_S + 5.0)
        if refused or len(offsets) < len(records):
            raise ServiceUnavailableError(refused[0] if refused else "Kafka does not take records: no answer")
        return [offsets[at] for at in range(len(records))]

    def _await_end(self, topic: str, offset: int) -> None:
        """A commit is decided when it returns, and can be read a moment later."""
        deadline_s = time.monotonic() + _FLUSH_S
        with RangeReader(self._config, self._services) as reader:
            while reader.bounds(topic, 0)[1] <= offset and time.monotonic() < deadline_s:
                continue

    @contextlib.contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        from confluent_kafka import KafkaException

        try:
            yield
        except KafkaException as exc:
            error = exc.args[0]
            hint = (
                "another replay of this job has begun since"
                if error.fatal()
                else (
                    f"expected transactions as {self._name}: is this user allowed to write with that transactional id?"
                )
            )
            raise ServiceUnavailableError(
                f"Kafka at {self._services.kafka} does not {what}: {error.str()} ({hint})"
            ) from exc


def _replay_letter(item: Replay) -> DeadLetter:
    letter = item.dead.letter
    return DeadLetter(
        worker=letter.worker, partition=letter.partition, offset=letter.offset,
        reason=f"replayed as offset {item.offset}", payload=b"", payload_bytes=0, samples=letter.samples,
        whole=letter.whole, time_s=time.time(), term=letter.term,
    )  # fmt: skip
