"""The records that a task gets: `Records`, a batch of records in columns, and `Record`, a single one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from doll.errors import TaskError

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]
_Beside: TypeAlias = tuple[bytes | None, Headers, int]  # key, headers and timestamp of a record
NO_TIMESTAMP_MS = -1


class Envelope(Protocol):
    """The part of a Kafka record other than its value; the message class of the client library has this interface."""

    def key(self) -> Any:
        """Return the key: bytes, or None."""

    def headers(self) -> Any:
        """Return the headers (key, value) in order; None if there are none."""

    def timestamp(self) -> tuple[int, int]:
        """Return the kind of the timestamp (0: no timestamp) and the timestamp in Unix milliseconds."""


class Record(NamedTuple):
    """One Kafka record.

    Attributes:
        value: the value; for a packed record, the part of the value with one sample.
        key: the key. None: the record has none.
        headers: (key, value) in order; a key may occur more than once.
        timestamp_ms: Unix milliseconds, from the clock of the producer or of the broker, as the topic is configured
            (`message.timestamp.type`). -1: the record has none.
        partition, offset: position of the record in its topic.
    """

    value: bytes
    key: bytes | None = None
    headers: Headers = ()
    timestamp_ms: int = NO_TIMESTAMP_MS
    partition: int = 0
    offset: int = 0


class Records(list[bytes]):
    """Records of one partition, in the order of their offsets: a list of their values, with further columns.

    `keys`, `headers` and `timestamps_ms` are computed when they are read. Each has one entry for each value; samples
    of one packed record have the same entries.

    Raises:
        TaskError: `keys`, `headers` or `timestamps_ms` was read, but `Task.whole_records` is not set.

    Attributes:
        offsets: offset of each record, int64, shape (n,).
        partition: number of the partition.
    """

    __slots__ = ("_beside", "offsets", "partition")

    def __init__(
        self,
        values: Iterable[bytes],
        offsets: npt.NDArray[np.int64] | None = None,
        partition: int = 0,
        envelopes: Sequence[Envelope | None] | None = None,
    ) -> None:
        """`offsets`: None: 0, 1, 2, ...; `envelopes`: one envelope for each value, or None if they are not known."""
        super().__init__(values)
        self.offsets = np.arange(len(self)) if offsets is None else offsets
        self.partition = partition
        self._beside: Iterable[_Beside] | None = None if envelopes is None else map(_read, envelopes)

    @classmethod
    def from_record(cls, record: Record) -> Records:
        """Return the batch that holds one record."""
        records = cls([record.value], np.array([record.offset]), record.partition)
        records._beside = [(record.key, record.headers, record.timestamp_ms)]
        return records

    @property
    def values(self) -> list[bytes]:
        """The values, as a list."""
        return self

    @property
    def keys(self) -> list[bytes | None]:
        """The key of each record; None if it has none."""
        return [key for key, _, _ in self._columns("keys")]

    @property
    def headers(self) -> list[Headers]:
        """The headers of each record: (key, value) in order; a key may occur more than once."""
        return [headers for _, headers, _ in self._columns("headers")]

    @property
    def timestamps_ms(self) -> npt.NDArray[np.int64]:
        """Unix milliseconds, int64, shape (n,); -1 if a record has no timestamp. See `Record.timestamp_ms`."""
        return np.array([stamp_ms for _, _, stamp_ms in self._columns("timestamps_ms")], np.int64)

    def _columns(self, name: str) -> Iterable[_Beside]:
        if self._beside is None:
            raise TaskError(
                f"Records.{name}: expected a task that asks for more than values: write `whole_records = True` in its "
                "class"
            )
        self._beside = list(self._beside)  # read once
        return self._beside


def values_of(rows: npt.NDArray[Any]) -> list[bytes]:
    """Return the bytes of each row of an array; each row is a record value."""
    block = rows.tobytes()
    width = len(block) // len(rows)
    return [block[at : at + width] for at in range(0, len(block), width)]


def record_of(value: bytes, envelope: Envelope | None, partition: int, offset: int) -> Record:
    """Return the record with this value."""
    return Record(value, *_read(envelope), partition, offset)


def envelope_bytes(envelope: Envelope) -> int:
    """Return the size of a record's key and headers in bytes."""
    key, headers, _ = _read(envelope)
    return len(key or b"") + sum(len(name) + len(value or b"") for name, value in headers)


def _read(envelope: Envelope | None) -> _Beside:
    if envelope is None:
        return None, (), NO_TIMESTAMP_MS
    kind, stamp_ms = envelope.timestamp()
    return envelope.key(), envelope.headers() or (), stamp_ms if kind else NO_TIMESTAMP_MS
