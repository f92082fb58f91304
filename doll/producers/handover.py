"""The handover from a history to its topic: the state for a restart, and the records that the history has. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from doll.errors import ConfigError, RecordError

ORIGIN: Final = "doll-origin"  # header of a sample: the number of its row, or its partition and offset in the topic
US_PER_UNIT: Final = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 1}  # `ns`: divide the product by 1000
SNAPSHOT, STATES = range(2)  # partitions of the topic `history`


class FileMark(msgspec.Struct, frozen=True, array_like=True):
    """A file of the table. `digest`: of its footer, which has the sizes and the statistics of its columns."""

    name: str
    num_bytes: int
    digest: str


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """The state of the history when the job began. `begin`: the first offset of each partition of the topic."""

    version: int
    files: tuple[FileMark, ...]
    rows: int
    end_us: int
    topic_id: str
    begin: tuple[int, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A record of the topic without a usable key or time, so that it is not known whether the history has it."""

    partition: int
    offset: int
    reason: str


class State(msgspec.Struct, frozen=True, tag="state"):
    """The position after a transaction, which has it as its last record.

    Attributes:
        rows: number of rows that were sent. The next one is in the chunk `piece`, whose first row is number `base`.
        offsets: the next offset of each partition of the topic.
        forwarded: number of records of the topic that were sent; `in_history` and `refused` were not.
        over: partitions in which the overlap is over.
    """

    rows: int = 0
    piece: int = 0
    base: int = 0
    offsets: tuple[int, ...] = ()
    forwarded: int = 0
    in_history: int = 0
    refused: int = 0
    over: tuple[int, ...] = ()


_decode: Final = msgspec.msgpack.Decoder(Snapshot | State | Refused).decode
encode: Final = msgspec.msgpack.Encoder().encode


def decode(value: bytes | None) -> Snapshot | State | Refused:
    """Return a record of the topic `history`. Raise RecordError if it is not one."""
    try:
        record: Snapshot | State | Refused = _decode(value or b"")
    except msgspec.MsgspecError as exc:
        raise RecordError(f"not a record of the topic history: {exc}") from exc
    return record


def begin_after(ends: Mapping[int, tuple[int, int, int]], bounds: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the first offset of each partition that is not in the table. Raise ConfigError if they do not fit.

    Args:
        ends: the first and the last offset, and the number of rows, of partitions in the table.
        bounds: the first and the next offset of each partition of the topic.
    """
    for partition, (first, last, count) in ends.items():
        where = f"source.handover: partition {partition}"
        if not 0 <= partition < len(bounds) or first < 0:
            raise ConfigError(f"{where}, offset {first} is in the table; the topic has {len(bounds)} partitions")
        if count > last - first + 1:
            raise ConfigError(f"{where}: {count} rows for offsets {first} to {last}: some are twice")
        if last >= (end := bounds[partition][1]):
            raise ConfigError(f"{where}: the table has offset {last}, the topic ends at {end}: is it another topic?")
    return tuple(ends[partition][1] + 1 if partition in ends else 0 for partition in range(len(bounds)))


def find_gap(begin: Sequence[int], bounds: Sequence[tuple[int, int]], *, by_time: bool = False) -> str:
    """Return which records between the history and what the topic has were deleted; "" if none were.

    Args:
        by_time: whether `begin` are the first records of a time that the topic has. Then an earlier one must be left.
    """
    for partition, (start, (low, _)) in enumerate(zip(begin, bounds, strict=True)):
        if start < low or (by_time and 0 < low == start):
            which = "some records" if by_time else f"the records {start} to {low - 1}"
            return f"partition {partition}: {which} after the end of the history were deleted (retention)"
    return ""


def changed(kept: Snapshot, files: Iterable[FileMark]) -> str:
    """Return how the files differ from those of the beginning; "" if they do not. Further files do not count."""
    now = {file.name: file for file in files}
    for file in kept.files:
        if (found := now.get(file.name)) != file:
            return f"file {file.name} was {'deleted' if found is None else 'written again'} since the history began"
    return ""


def identity(key: Any, time_us: int) -> int:
    """Return the identity of a row and of its record in the topic; valid within one process. Times count in
    milliseconds, because the topic and the table may have different units."""
    return hash((str(key), time_us // 1000))


def stream_of(partition: int, offset: int, partitions: int, streams: int) -> int:
    """Return the stream of a record. If `streams` divides `partitions`, each partition stays in order; otherwise its
    records go to the streams in turn.

    >>> [stream_of(5, offset, 12, 4) for offset in range(3)], [stream_of(0, offset, 1, 2) for offset in range(3)]
    ([1, 1, 1], [0, 1, 0])
    """
    return (offset * partitions + partition) % streams


class Overlap:
    """Says which records of the topic the history has, if only their key and time tell.

    A record that arrived more than the overlap after the latest time of the history is not in it, nor is any later one
    of its partition. An earlier one is in it if a row has its key and time; of n such rows, n records count, also those
    that arrived before the overlap.

    Args:
        rows: identities of the rows from `since_us(...)` on.
    """

    def __init__(self, end_us: int, overlap_us: int, rows: Iterable[int]) -> None:
        self._last_us = end_us + overlap_us
        self._left = Counter(rows)
        self.over: set[int] = set()

    @staticmethod
    def since_us(end_us: int, overlap_us: int) -> int:
        """Return the least event time of a record that arrives in the overlap."""
        return end_us - 2 * overlap_us

    def is_open(self, partition: int, arrived_us: int) -> bool:
        """Return whether a record that arrived then may be in the history. Ask in the order of the partition."""
        if arrived_us > self._last_us:
            self.over.add(partition)
        return partition not in self.over

    def takes(self, known: int) -> bool:
        """Return whether the history has a record of this identity, which then does not count again."""
        if self._left[known] <= 0:
            return False
        self._left[known] -= 1
        return True
