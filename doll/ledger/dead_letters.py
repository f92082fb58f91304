"""Dead letters for people: which records could not be learned and why, and how to put them into the stream again.

A record is dead only if an update of the durable model says so. Its letter alone does not prove it. If a worker dies
before its batch is durable, the batch is decoded again, perhaps with a corrected task. A refused record may then be
learned; its letter is superseded. A letter after the newest checkpoint is pending: the record may still be learned.

A replay appends the record to the end of its partition as a new record, and writes a letter with the new offset. Both
are written in one transaction. So no record is replayed twice, even after a crash or if two replays run at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

from msgspec import MsgspecError, json, structs

from doll.config import JobConfig
from doll.errors import ConfigError
from doll.kafka import topics
from doll.kafka.foreign_topic import require_own_topic
from doll.kafka.group_stream import Output, TransactionalWriter
from doll.kafka.range_reader import RangeReader
from doll.ledger.audit import build_ledger
from doll.ledger.balance import OffsetState
from doll.process.files import write_atomically
from doll.records.bounded import short
from doll.records.control import DeadLetter, encode
from doll.services import Services
from doll.storage.checkpoints import CheckpointStore

MAX_SAVED: Final = 1_000
SAVED_PAYLOAD_BYTES: Final = 1_024

_COMMIT_VISIBLE_S: Final = 30.0
_RECORDS_PER_TRANSACTION: Final = 500

State = Literal["dead", "replayed", "superseded", "in part", "pending"]


@dataclass(frozen=True)
class DeadRecord:
    """One record that a worker could not learn, completely or in part."""

    letter: DeadLetter  # the newest letter; for a dead record, the newest that refuses the whole record
    replayed_as: tuple[int, ...] = ()  # the offsets of its replays in the same partition
    offset_state: OffsetState = "pending"  # state of its offset in the durable model

    @property
    def state(self) -> State:
        """The state of the record. `dead`: not learned; `replayed`: dead and replayed; `superseded`: learned since; `in
        part`: its other samples are learned; `pending`: not in a checkpoint yet."""
        match self.offset_state:
            case "pending":
                return "pending"
            case "dead" | "absent" | "skipped":
                return "replayed" if self.replayed_as else "dead"
            case "partly" | "held out" if not self.letter.whole:
                return "in part"
        return "superseded"

    @property
    def at(self) -> tuple[int, int]:
        """The partition and the offset of the record."""
        return self.letter.partition, self.letter.offset


class Selection(NamedTuple):
    """A selection of refused records.

    Attributes:
        reason: text; only records whose reason contains it, in upper or lower case.
        code: only records with this code. None: all codes.
        at: pairs (partition, offset); only these records. Empty: all records.
    """

    reason: str = ""
    code: str | None = None
    at: Sequence[tuple[int, int]] = ()

    def takes(self, reason: str, code: str, at: tuple[int, int]) -> bool:
        """Return whether a record with this reason, code and place is selected."""
        return self.reason.lower() in reason.lower() and self.code in (None, code) and (not self.at or at in self.at)


ALL: Final = Selection()


def dead_records(
    config: JobConfig, services: Services, store: CheckpointStore, selection: Selection = ALL
) -> list[DeadRecord]:
    """Return the selected records that have letters, in the order of partition and offset. Reads only.

    Args:
        store: the checkpoint store, whose newest checkpoint is the durable model.

    Raises:
        ServiceUnavailableError: Kafka does not answer, or does not have the job's topics.
        CheckpointError: the checkpoint cannot be read.
    """
    topics.check(config, services)
    checkpoint = store.load_newest_state()
    with RangeReader(config, services) as reader:
        ledger, generation = build_ledger(config, reader, checkpoint)
        letters = generation.letters(reader.records(config.topic("dead"), (DeadLetter,)))
        return collect(letters, ledger.offset_state, selection)


def save_dead_records(path: Path, dead: Sequence[DeadRecord]) -> None:
    """Write the first `MAX_SAVED` dead records to a file, with the beginning of each payload, because the topic may be
    lost with its broker. Raise OSError if the file cannot be written."""
    kept = [
        replace(item, letter=structs.replace(item.letter, payload=item.letter.payload[:SAVED_PAYLOAD_BYTES]))
        for item in dead[:MAX_SAVED]
    ]
    write_atomically(path, json.format(json.encode(kept), indent=1))


def saved_dead_records(path: Path, selection: Selection = ALL) -> list[DeadRecord]:
    """Return the selected dead records in a file of `save_dead_records`. Raise ConfigError if the file cannot be
    read."""
    try:
        saved = json.decode(path.read_bytes(), type=list[DeadRecord])
    except (OSError, MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"cannot read {path}: {short(exc)}") from exc
    return [item for item in saved if selection.takes(item.letter.reason, item.letter.code, item.at)]


def collect(
    letters: Iterable[DeadLetter], offset_state: Callable[[int, int], OffsetState], selection: Selection = ALL
) -> list[DeadRecord]:
    """Return a `DeadRecord` for each selected record that has letters, in the order of partition and offset. Pure."""
    newest: dict[tuple[int, int], DeadLetter] = {}
    newest_whole: dict[tuple[int, int], DeadLetter] = {}
    replayed: dict[tuple[int, int], tuple[int, ...]] = {}
    for letter in letters:
        key = (letter.partition, letter.offset)
        if letter.code == "replayed":
            replayed[key] = (*replayed.get(key, ()), letter.replayed_as)
            continue
        newest[key] = letter
        if letter.whole:
            newest_whole[key] = letter
    records = []
    for key in sorted(newest):
        state = offset_state(*key)
        letter = newest_whole.get(key, newest[key]) if state in ("dead", "absent") else newest[key]
        if selection.takes(letter.reason, letter.code, key):
            records.append(DeadRecord(letter, replayed.get(key, ()), state))
    return records


@dataclass(frozen=True)
class Replay:
    """The result of replaying one dead record, or the plan for it."""

    dead: DeadRecord
    # Source of the record's bytes: the samples topic or the letter. None: the record is not replayed.
    source: Literal["topic", "letter"] | None = None
    value: bytes | None = None  # the bytes; None: the record is not replayed
    offset: int | None = None  # its new offset in the partition; None: it was not sent
    skip_reason: str = ""  # the reason why the record is not replayed; "": it is replayed


def replay(
    config: JobConfig, services: Services, chosen: Sequence[DeadRecord], *, dry_run: bool = False, again: bool = False
) -> list[Replay]:
    """Put dead records into the stream again, each at the end of its partition, in the order of `chosen`.

    Args:
        chosen: records from `dead_records`; only dead records are replayed.
        dry_run: True: return the plan, and send nothing.
        again: True: also replay records that were replayed before.

    Raises:
        ConfigError: the samples topic belongs to another application.
        ServiceUnavailableError: Kafka does not answer or refuses a record. Records that are already in the stream have
            their letters.
        FencedError: another replay has begun since.
    """
    require_own_topic(config, "doll dead replay")
    if dry_run:
        return _planned(config, services, chosen, again)
    with contextlib.closing(replay_publisher(config, services)) as publisher:
        # Read the letters again: another replay may have sent some of the records since `chosen` was read.
        with RangeReader(config, services) as reader:
            letters = reader.records(config.topic("dead"), (DeadLetter,))
            now = {dead.at: dead.replayed_as for dead in collect(letters, lambda partition, offset: "dead")}
        chosen = [replace(dead, replayed_as=now.get(dead.at, dead.replayed_as)) for dead in chosen]
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
        num_partitions = reader.num_partitions(config.topic("samples"))
        return [
            Replay(dead, skip_reason=skip_reason)
            if (skip_reason := _skip_reason(num_partitions, dead, again))
            else _with_payload(config, reader, dead)
            for dead in chosen
        ]


def _skip_reason(num_partitions: int, dead: DeadRecord, again: bool) -> str:
    letter = dead.letter
    if not 0 <= letter.partition < num_partitions:
        return f"it names partition {letter.partition}, the job has {num_partitions}"
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
    if len(letter.payload) == letter.payload_bytes:
        return Replay(dead, "letter", letter.payload)
    return Replay(
        dead,
        skip_reason="the samples topic no longer holds it, and the letter kept only the first "
        f"{len(letter.payload)} of {letter.payload_bytes} bytes",
    )


def replay_publisher(config: JobConfig, services: Services) -> TransactionalWriter:
    """Return the publisher for replays of a job. If two replays run at once, only the later one continues."""
    name = f"doll-{config.job}-replay"
    return TransactionalWriter(
        config, services, name, transaction_s=30.0, call_s=35.0, compression="none",  # as the producer sends samples
        fenced="another replay of this job has begun since",
    )  # fmt: skip


def _send(
    config: JobConfig, services: Services, publisher: TransactionalWriter, items: Sequence[Replay]
) -> list[Replay]:
    """Send some records, each with its letter, in one transaction. After the return, all readers see the records."""
    samples, dead = config.topic("samples"), config.topic("dead")
    with publisher.transaction():
        offsets = publisher.deliver([Output(samples, item.dead.letter.partition, item.value or b"") for item in items])
        replayed = [replace(item, offset=offset) for item, offset in zip(items, offsets, strict=True)]
        letters = [
            structs.replace(
                item.dead.letter, code="replayed", replayed_as=offset, reason=f"replayed as offset {offset}",
                payload=b"", payload_bytes=0, time_s=time.time(),
            )
            for item, offset in zip(items, offsets, strict=True)
        ]  # fmt: skip
        (*_, last) = publisher.deliver([Output(dead, 0, encode(letter)) for letter in letters])
    _await_visible(config, services, dead, last)
    return replayed


def _await_visible(config: JobConfig, services: Services, topic: str, offset: int) -> None:
    """Wait until readers see the record at `offset`: the records of a committed transaction become readable only a
    moment after the commit returns."""
    deadline_s = time.monotonic() + _COMMIT_VISIBLE_S
    with RangeReader(config, services) as reader:
        while reader.bounds(topic, 0)[1] <= offset and time.monotonic() < deadline_s:
            continue
