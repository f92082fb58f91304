"""Replaying dead records: each becomes a new record at the end of its partition, and a letter says at which offset.

Both are written in one transaction, so that no crash, and no second replay at the same time, replays a record twice.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from doll.kafka.range_reader import RangeReader
from doll.kafka.transactions import TransactionalPublisher
from doll.ledger.dead_letters import DeadRecord, collect
from doll.records.control import DeadLetter, encode

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services

_COMMIT_VISIBLE_S: Final = 30.0
_RECORDS_PER_TRANSACTION: Final = 500


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


def replay(
    config: JobConfig, services: Services, chosen: Sequence[DeadRecord], *, dry_run: bool = False, again: bool = False
) -> list[Replay]:
    """Put dead records into the stream again, each at the end of its partition, in their order.

    Args:
        chosen: as `dead_records` found them; only dead records are replayed.
        dry_run: say what would be done, send nothing.
        again: also records that were replayed before.

    Raises:
        ServiceUnavailableError: Kafka does not answer, refuses a record, or another replay has begun since. What is in
            the stream by then has its letter.
    """
    if dry_run:
        return _planned(config, services, chosen, again)
    with replay_publisher(config, services) as publisher:
        # Read again: another replay may have sent some of them since `chosen` was read.
        with RangeReader(config, services) as reader:
            letters = reader.records(config.topic("dead"), (DeadLetter,))
            now = {dead.at: dead.replayed_as for dead in collect(letters, lambda partition, offset: "dead")}
        chosen = [dataclasses.replace(dead, replayed_as=now.get(dead.at, dead.replayed_as)) for dead in chosen]
        planned = _planned(config, services, chosen, again)
        sending = [item for item in planned if item.value is not None]
        sent = {
            item.dead.at: item
            for at in range(0, len(sending), _RECORDS_PER_TRANSACTION)
            for item in _send(config, services, publisher, sending[at : at + _RECORDS_PER_TRANSACTION])
        }
    return [sent.get(item.dead.at, item) for item in planned]


def _planned(config: JobConfig, services: Services, chosen: Sequence[DeadRecord], again: bool) -> list[Replay]:
    with RangeReader(config, services) as reader:
        return [
            Replay(dead, skip_reason=skip_reason)
            if (skip_reason := _skip_reason(config, dead, again))
            else _with_payload(config, reader, dead)
            for dead in chosen
        ]


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
    if letter.code == "unreadable":
        return "Kafka's client cannot read the batch of records that it is in"
    if letter.payload_bytes == 0:
        return "it is empty"
    if dead.replayed_as and not again:
        return (
            f"replayed before, as offset {', '.join(map(str, dead.replayed_as))} (--include-replayed replays it again)"
        )
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


def replay_publisher(config: JobConfig, services: Services) -> TransactionalPublisher:
    """What replays of a job send with: of two at a time the later one goes on."""
    name = f"doll-{config.job}-replay"
    return TransactionalPublisher(config, services, name, fenced="another replay of this job has begun since")


def _send(
    config: JobConfig, services: Services, publisher: TransactionalPublisher, items: Sequence[Replay]
) -> list[Replay]:
    """Send some records, each with its letter, in one transaction; when this returns, all readers see them.

    Raises:
        ServiceUnavailableError: Kafka does not accept them. None of them is in the stream then.
    """
    samples, dead = config.topic("samples"), config.topic("dead")
    with publisher.transaction():
        offsets = publisher.deliver([(samples, item.dead.letter.partition, item.value or b"") for item in items])
        replayed = [dataclasses.replace(item, offset=offset) for item, offset in zip(items, offsets, strict=True)]
        letters = [_replay_letter(item.dead.letter, offset) for item, offset in zip(items, offsets, strict=True)]
        (*_, last) = publisher.deliver([(dead, 0, encode(letter)) for letter in letters])
    _await_visible(config, services, dead, last)
    return replayed


def _await_visible(config: JobConfig, services: Services, topic: str, offset: int) -> None:
    """A commit is decided when it returns, and its records can be read a moment later."""
    deadline_s = time.monotonic() + _COMMIT_VISIBLE_S
    with RangeReader(config, services) as reader:
        while reader.bounds(topic, 0)[1] <= offset and time.monotonic() < deadline_s:
            continue


def _replay_letter(letter: DeadLetter, offset: int) -> DeadLetter:
    return msgspec.structs.replace(
        letter, code="replayed", replayed_as=offset, reason=f"replayed as offset {offset}", payload=b"",
        payload_bytes=0, time_s=time.time(),
    )  # fmt: skip
