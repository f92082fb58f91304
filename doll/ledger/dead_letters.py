"""Dead letters, for people: which records could not be learned, and why.

A record is dead only if the durable model's updates name it so. Its letter alone is no proof: a batch that was not
durable when its worker died is decoded again, perhaps by a corrected task, and what was refused before is then learned;
that letter is superseded. A letter beyond the newest checkpoint is pending: it may still turn out either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from msgspec import MsgspecError, json, structs

from doll.errors import ConfigError
from doll.kafka import topics
from doll.kafka.range_reader import RangeReader
from doll.ledger.audit import build_ledger
from doll.ledger.balance import OffsetState
from doll.process.files import write_atomically
from doll.records.bounded import short
from doll.records.control import DeadLetter, DeadLetterCode

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services
    from doll.storage.checkpoints import CheckpointStore

MAX_SAVED: Final = 1_000
SAVED_PAYLOAD_BYTES: Final = 1_024

State = Literal["dead", "replayed", "superseded", "in part", "pending"]


@dataclass(frozen=True)
class DeadRecord:
    """One record that could not be learned, wholly or in part, when somebody tried.

    Attributes:
        letter: the newest one; of a record that is dead, the newest that refuses all of it.
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


def dead_records(
    config: JobConfig,
    services: Services,
    store: CheckpointStore,
    *,
    reason: str = "",
    code: DeadLetterCode | None = None,
    at: Sequence[tuple[int, int]] = (),
) -> list[DeadRecord]:
    """The records that have letters, by partition and offset. Reads only.

    Args:
        store: its newest checkpoint says how far the durable model reaches.
        reason: only those whose reason contains this text, in any case.
        code: only records that were refused for this.
        at: only those at these partitions and offsets; empty: all.

    Raises:
        ServiceUnavailableError: Kafka does not answer, or the job has no topics there.
        CheckpointError: the checkpoint cannot be read.
    """
    topics.check(config, services)
    checkpoint = store.load_newest(None)
    with RangeReader(config, services) as reader:
        ledger, generation = build_ledger(config, reader, checkpoint)
        letters = generation.letters(reader.records(config.topic("dead"), (DeadLetter,)))
        return collect(letters, ledger.offset_state, reason=reason, code=code, at=at)


def save_dead_records(path: Path, dead: Sequence[DeadRecord]) -> None:
    """Keep the first `MAX_SAVED` in a file, with the beginnings of their contents: the topic may go with its broker.

    Raises:
        OSError: it cannot be written.
    """
    kept = [
        replace(item, letter=structs.replace(item.letter, payload=item.letter.payload[:SAVED_PAYLOAD_BYTES]))
        for item in dead[:MAX_SAVED]
    ]
    write_atomically(path, json.format(json.encode(kept), indent=1))


def saved_dead_records(
    path: Path, *, reason: str = "", code: DeadLetterCode | None = None, at: Sequence[tuple[int, int]] = ()
) -> list[DeadRecord]:
    """Those of a file that `save_dead_records` wrote, selected as by `dead_records`.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        saved = json.decode(path.read_bytes(), type=list[DeadRecord])
    except (OSError, MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"cannot read {path}: {short(exc)}") from exc
    return [
        item
        for item in saved
        if reason.lower() in item.letter.reason.lower()
        and code in (None, item.letter.code)
        and (not at or item.at in at)
    ]


def collect(
    letters: Iterable[DeadLetter],
    offset_state: Callable[[int, int], OffsetState],
    *,
    reason: str = "",
    code: DeadLetterCode | None = None,
    at: Sequence[tuple[int, int]] = (),
) -> list[DeadRecord]:
    """One `DeadRecord` for each record that has letters, by partition and offset. Pure.

    Args:
        letters: in the order of the topic.
        offset_state: of a partition and offset in the durable model.
        reason, code, at: as in `dead_records`.
    """
    newest: dict[tuple[int, int], DeadLetter] = {}
    newest_whole: dict[tuple[int, int], DeadLetter] = {}
    replayed: dict[tuple[int, int], tuple[int, ...]] = {}
    for letter in letters:
        key = (letter.partition, letter.offset)
        if at and key not in at:
            continue
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
        if reason.lower() in letter.reason.lower() and code in (None, letter.code):
            records.append(DeadRecord(letter, replayed.get(key, ()), state))
    return records
