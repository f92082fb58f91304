"""Dead letters, for people: which records could not be learned and why, and putting them into the stream again.

A record is replayed as a new record at the end of its partition, and a letter says so (`replayed as offset n`): first
the record, acknowledged, then the letter, so a crash between the two can only replay a record once more. What stands
before the durable model's reach is settled; a letter beyond it may still turn out otherwise (its batch may be decoded
again, by a mended task), so it is not replayed yet.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from doll import topics
from doll.audit import counts_of
from doll.errors import ServiceUnavailableError
from doll.records import DeadLetter, encode
from doll.services import Services, kafka_settings
from doll.topic_reader import TopicReader

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.ps.checkpoints import CheckpointStore

_REPLAYED: Final = re.compile(r"replayed as offset (\d+)")
_FLUSH_S: Final = 30.0


@dataclass(frozen=True)
class Dead:
    """One record that could not be learned, wholly or in part.

    Attributes:
        letter: the newest word on it from a worker.
        replayed_as: the offsets at which it was put into the stream again, in the same partition.
    """

    letter: DeadLetter
    replayed_as: tuple[int, ...] = ()

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
    config: JobConfig, services: Services, *, reason: str = "", at: Sequence[tuple[int, int]] = ()
) -> list[Dead]:
    """The job's dead records, by partition and offset. Reads only.

    Args:
        reason: only those whose reason contains this text, in any case.
        at: only those at these partitions and offsets; empty: all.

    Raises:
        ServiceUnavailableError: Kafka does not answer, or the job has no topics there.
    """
    topics.check(config, services)
    with TopicReader(config, services) as reader:
        return collect(reader.records(config.topic("dead"), (DeadLetter,)), reason=reason, at=at)


def collect(letters: Iterable[DeadLetter], *, reason: str = "", at: Sequence[tuple[int, int]] = ()) -> list[Dead]:
    """One `Dead` for each record that letters tell of, in the order of the topic. Pure."""
    newest: dict[tuple[int, int], DeadLetter] = {}
    replayed: dict[tuple[int, int], tuple[int, ...]] = {}
    for letter in letters:
        key = (letter.partition, letter.offset)
        if (match := _REPLAYED.fullmatch(letter.reason)) is not None and not letter.payload:
            replayed[key] = (*replayed.get(key, ()), int(match[1]))
        else:
            newest[key] = letter
    return [
        Dead(letter, replayed.get(key, ()))
        for key, letter in sorted(newest.items())
        if reason.lower() in letter.reason.lower() and (not at or key in at)
    ]


def replay(
    config: JobConfig,
    services: Services,
    store: CheckpointStore,
    chosen: Sequence[Dead],
    *,
    dry_run: bool = False,
    again: bool = False,
) -> list[Replay]:
    """Put dead records into the stream again, each at the end of its partition, in their order.

    Args:
        store: says how far the durable model reaches.
        dry_run: say what would be done, send nothing.
        again: also those that were replayed before.

    Raises:
        ServiceUnavailableError: Kafka does not answer or does not take a record. Those before it are in the stream,
            each with its letter.
        CheckpointError: the checkpoint cannot be read.
    """
    checkpoint = store.load_newest(None)
    reach = [0] * config.data.workers
    if checkpoint is not None:
        counts = counts_of(config, checkpoint)
        reach = [
            origin + applied * counts.records_per_batch
            for origin, applied in zip(counts.origins, counts.applied, strict=True)
        ]
    found = []
    with TopicReader(config, services) as reader:
        for dead in chosen:
            why_not = _obstacle(dead, reach, again)
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


def _obstacle(dead: Dead, reach: Sequence[int], again: bool) -> str:
    letter = dead.letter
    if not 0 <= letter.partition < len(reach):
        return f"it names partition {letter.partition}, the job has {len(reach)}"
    if letter.offset >= reach[letter.partition]:
        return "its batch is not in a checkpoint yet, and may still be decoded otherwise: try again later"
    if not letter.whole:
        return "the other samples of its packed record are learned, and would be learned twice"
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
