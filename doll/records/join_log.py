"""The join log and its journal: the topics in which `doll join` keeps its state. Pure.

The join log has the records of all joined topics, distributed by key to the partitions of one topic.

A joiner divides what it reads into packs, one for each partition of the log. A pack also says how far the joiner has
read, and up to which event time. So all that happens to the keys of a partition follows from its log alone, also when
their windows close. After a restart, the joiner reads the log again and comes to the same state. The journal says for
each partition of the log what became of its records.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

import msgspec

from doll.errors import RecordError

T = TypeVar("T")

FEATURES: Final = 0  # source of features; labels have the numbers from 1, in the order of the job file
_PACK: Final = b"J\x01"
_STEP: Final = b"S\x01"
MAX_PAYLOAD_BYTES: Final = 65_536  # of a refused record in the journal


class Routed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A record on its way to the records of the same key.

    Attributes:
        source: `FEATURES`, or 1 and above for labels.
        partition, offset: where the record is in its topic.
        time_ms: event time, milliseconds since 1970.
        value: features: the JSON object, without its last brace and with a comma if it has fields. Labels: the label as
            JSON; empty if the label is retracted.
    """

    source: int
    partition: int
    offset: int
    time_ms: int
    key: bytes
    value: bytes


class Progress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How far a partition of a joined topic has been read. `time_ms`: its watermark. Records before this event time
    are late."""

    source: int
    partition: int
    offset: int
    time_ms: int


class Pack(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Records of one joiner, in their order. `progress` holds after them, and `now_ms` is the joiner's clock."""

    now_ms: int
    records: list[Routed]
    progress: list[Progress]


class RefusedRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A record that is in no sample. `value` is cut at `MAX_PAYLOAD_BYTES`."""

    source: int
    partition: int
    offset: int
    time_ms: int
    key: bytes
    value: bytes
    code: str
    reason: str


class Kept(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An open key that stays after its first sample, for corrections. `serial`: the number of its features in the log.
    `shown`: the labels of its newest sample."""

    serial: int
    state: str
    shown: bytes


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """The decisions of one transaction of a joiner about one partition of the log.

    Attributes:
        until: the log was joined up to this offset.
        restart: how a later joiner continues (`Restart`).
        settled: numbers, in the log, of records of which no open key has need any more; each minus the one before.
        kept: keys that have changed their state and stay.
        dropped: partition and offset of features whose window has closed without a label, if these are dropped.
        refused: records that are in no sample.
        samples, corrections: how many were written.
        open: open keys after it.
        now_ms: the joiner's clock.
        features_ms, labels_ms: event time up to which all features, and all labels, have been read; -1: unknown.
    """

    until: int
    joiner: int
    now_ms: int
    restart: str = ""
    settled: list[int] = []
    kept: list[Kept] = []
    dropped: list[tuple[int, int]] = []
    refused: list[RefusedRecord] = []
    samples: int = 0
    corrections: int = 0
    open: int = 0
    features_ms: int = -1
    labels_ms: int = -1


class Restart(NamedTuple):
    """Where a matcher continues, and how it gets its state: from the log and the journal, both from an offset on.

    Attributes:
        offset, serial: of the first record of the log that may be of an open key.
        journal: offset of the journal.
        until: serial of the record after the last one that has been joined.
        marks: the watermarks.
        topics: Kafka's ids of the joined topics, in the order of the job file.
    """

    offset: int
    serial: int
    journal: int
    until: int
    marks: list[list[int]]
    topics: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the text that `parse_restart` reads. It fits into the metadata of an offset if the topics have some
        hundred partitions."""
        return base64.b85encode(zlib.compress(msgspec.msgpack.encode(self), 9)).decode()


def parse_restart(text: str) -> Restart:
    """Raise ValueError if the text is not that of a restart."""
    try:
        return msgspec.msgpack.decode(zlib.decompress(base64.b85decode(text)), type=Restart)
    except (zlib.error, msgspec.MsgspecError) as exc:
        raise ValueError(f"expected the state of a join, got {text[:40]!r}: {exc}") from exc


_encode = msgspec.msgpack.Encoder().encode
_decode_pack = msgspec.msgpack.Decoder(Pack).decode
_decode_step = msgspec.msgpack.Decoder(Step).decode


def encode(record: Pack | Step) -> bytes:
    return (_PACK if isinstance(record, Pack) else _STEP) + _encode(record)


def decode_pack(data: bytes | None) -> Pack:
    """Raise RecordError if the bytes are not a pack of the join log."""
    return _decoded(data, _PACK, _decode_pack)


def decode_step(data: bytes | None) -> Step:
    """Raise RecordError if the bytes are not a step of the journal."""
    return _decoded(data, _STEP, _decode_step)


def _decoded(data: bytes | None, magic: bytes, decode: Callable[[memoryview], T]) -> T:
    if not data or data[:2] != magic:
        raise RecordError(f"expected a record of the join that begins with {magic!r}, got {(data or b'')[:2]!r}")
    try:
        return decode(memoryview(data)[2:])
    except msgspec.MsgspecError as exc:
        raise RecordError(f"expected a record of the join: {exc}") from exc


def differences(numbers: Iterable[int]) -> list[int]:
    """Return ascending numbers, each minus the one before. They are short in MessagePack.

    >>> differences([7, 9, 4])
    [4, 3, 2]
    """
    ordered = sorted(numbers)
    return [number - before for before, number in pairwise([0, *ordered])]


def partition_of(key: bytes, num_partitions: int) -> int:
    """Return the partition of the log that has the records of a key."""
    return zlib.crc32(key) % num_partitions
