"""Dead letters, for people: which records could not be learned and why, and putting them into the stream again.

A record is dead only if the durable model's updates say so. Its letter alone does not: a batch that was not durable
when its worker died is decoded again, perhaps by a corrected task, and what was refused before is then learned; that
letter is superseded. A letter beyond the newest checkpoint is pending: it may still turn out either way.

A record is replayed as a new record at the end of its partition, and a letter says so (`replayed as offset n`): first
the record, acknowledged, then the letter, so a crash between the two can only replay a record once more.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from doll import topics
from doll.audit import ledger_of
from doll.errors import ServiceUnavailableError
from doll.ledger import Fate
from doll.records import DeadLetter, encode
from doll.services import Services, kafka_settings
from doll.topic_reader import TopicReader

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.ps.checkpoints import CheckpointStore

_REPLAYED: Final = re.compile(r"replayed as offset (\d+)")
_FLUSH_S: Final = 30.0


State = Literal["dead", "replayed", "superseded", "in part", "pending"]


@dataclass(frozen=True)
class Dead:
    """One record that could not be learned, wholly or in part, when somebody tried.

    Attributes:
        letter: the newest word on it from a worker; of a record that is dead, the newest that refuses all of it.
        replayed_as: the offsets at which it was put into the stream again, in the same partition.
        fate: what became of its offset in the durable model.
    """

    letter: DeadLetter
    replayed_as: tuple[int, ...] = ()
    fate: Fate = "pending"

    @property
    def state(self) -> State:
        """`dead`, and perhaps `replayed`; `superseded`: learned since; `in part`: its other samples are learned;
        `pending`: not in a checkpoint yet."""
        match self.fate:
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
        why_not: why it is not replayed; "" where it is.
    """

    dead: Dead
    source: Literal["topic", "letter"] | None = None
    value: bytes | None = None
    offset: int | None = None
    why_not: str = ""


def dead_records(
    config: JobConfig,
    services: Services,
    store: CheckpointStore,
    *,
    reason: str = "",
    at: Sequence[tuple[int, int]] = (),
) -> list[Dead]:
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
    with TopicReader(config, services) as reader:
        ledger, own = ledger_of(config, reader, checkpoint)
        letters = own.letters(reader.records(config.topic("dead"), (DeadLetter,)))
        return collect(letters, ledger.fate, reason=reason, at=at)


def collect(
    letters: Iterable[DeadLetter],
    fate: Callable[[int, int], Fate],
    *,
    reason: str = "",
    at: Sequence[tuple[int, int]] = (),
) -> list[Dead]:
    """One `Dead` for each record that letters tell of, by partition and offset. Pure.

    Args:
        letters: in the order of the topic.
        fate: of a partition and offset in the durable model.
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
        known = fate(*key)
        letter = newest_whole.get(key, newest[key]) if known in ("dead", "absent") else newest[key]
        found.append(Dead(letter, replayed.get(key, ()), known))
    return [dead for dead in found if reason.lower() in dead.letter.reason.lower()]


def replay(
    config: JobConfig, services: Services, chosen: Sequence[Dead], *, dry_run: bool = False, again: bool = False
) -> list[Replay]:
    """Put dead records into the stream again, each at the end of its partition, in their order.

    Args:
        chosen: as `dead_records` found them; only those that are dead are replayed.
        dry_run: say what would be done, send nothing.
        again: also those that were replayed before.

    Raises:
        ServiceUnavailableError: Kafka does not answer or does not take a record. Those before it are in the stream,
            each with its letter.
    """
    found = []
    with TopicReader(config, services) as reader:
        for dead in chosen:
            why_not = _obstacle(config, dead, again)
            found.append(Replay(dead, why_not=why_not) if why_not else _with_bytes(config, reader, dead))
    if dry_run:
        return found
    from confluent_kafka import Producer

    producer = Producer(
        kafka_settings(
            config, services, acks="all", enable_idempotence=True, message_timeout_ms=int(_FLUSH_S * 1000),
            message_max_bytes=32 * 1024 * 1024,
        )
    )  # fmt: skip
    return [item if item.value is None else _send(config, producer, item) for item in found]


def _obstacle(config: JobConfig, dead: Dead, again: bool) -> str:
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


def _with_bytes(config: JobConfig, reader: TopicReader, dead: Dead) -> Replay:
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
        why_not=f"the samples topic holds it no more, and the letter kept only the first {len(letter.payload)} of "
        f"{letter.payload_bytes} bytes",
    )


def _send(config: JobConfig, producer: Any, item: Replay) -> Replay:
    letter = item.dead.letter
    offset = _deliver(producer, config.topic("samples"), item.value or b"", letter.partition)
    told = DeadLetter(
        worker=letter.worker, partition=letter.partition, offset=letter.offset, reason=f"replayed as offset {offset}",
        payload=b"", payload_bytes=0, samples=letter.samples, whole=letter.whole, time_s=time.time(),
        ps_epoch=letter.ps_epoch,
    )  # fmt: skip
    _deliver(producer, config.topic("dead"), encode(told), 0)
    return Replay(item.dead, item.source, item.value, offset)


def _deliver(producer: Any, topic: str, value: bytes, partition: int) -> int:
    """The offset of the record, which Kafka has when this returns."""
    outcome: list[Any] = []
    producer.produce(
        topic, value, partition=partition, on_delivery=lambda error, message: outcome.append((error, message))
    )
    producer.flush(_FLUSH_S + 5.0)
    error, message = outcome[0] if outcome else ("no answer", None)
    if error is not None or message is None:
        raise ServiceUnavailableError(f"Kafka does not take a record on {topic}, partition {partition}: {error}")
    return int(message.offset())
