"""The records that a task gets: `Records`, a batch of them in columns, and `Record`, a single one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from doll.errors import TaskError

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]
_T = TypeVar("_T")
NO_TIMESTAMP_MS = -1


class Envelope(Protocol):
    """The part of a Kafka record beside its value; the client library's message is one."""

    def key(self) -> Any:
        """Bytes, or None."""

    def headers(self) -> Any:
        """(key, value) in order; None if there is none."""

    def timestamp(self) -> tuple[int, int]:
        """Kind, 0 for none, and Unix milliseconds."""


class Record(NamedTuple):
    """One Kafka record.

    Attributes:
        value: of a packed record, one sample of it.
        key: None if the record has none.
        headers: (key, value) in order; a key may occur more than once.
        timestamp_ms: Unix milliseconds, by the clock of its producer or of the broker, as the topic is configured
            (`message.timestamp.type`); -1 if it has none.
        partition, offset: where it stands in its topic.
    """

    value: bytes
    key: bytes | None = None
    headers: Headers = ()
    timestamp_ms: int = NO_TIMESTAMP_MS
    partition: int = 0
    offset: int = 0


class Records(list[bytes]):
    """Records of one partition, in the order of their offsets: the list of their values, with columns beside it.

    `keys`, `headers` and `timestamps_ms` are made when they are asked for. Each has one entry for each value; samples
    of one packed record share theirs.

    Raises:
        TaskError: `keys`, `headers` or `timestamps_ms` are asked for, and `Task.whole_records` is not set.

    Attributes:
        offsets: int64, shape (n,).
        partition: number of the partition.
    """

    __slots__ = ("_envelopes", "offsets", "partition")

    def __init__(
        self,
        values: Iterable[bytes],
        offsets: npt.NDArray[np.int64] | None = None,
        partition: int = 0,
        envelopes: Sequence[Envelope | None] | None = None,
    ) -> None:
        """`offsets`: None: 0, 1, 2, ...; `envelopes`: one for each value; None: not known."""
        super().__init__(values)
        self.offsets = np.arange(len(self)) if offsets is None else offsets
        self.partition = partition
        self._envelopes = envelopes

    @classmethod
    def from_record(cls, record: Record) -> Records:
        """The batch that holds one record."""
        return cls([record.value], np.array([record.offset]), record.partition, [_Whole(record)])

    @property
    def values(self) -> list[bytes]:
        """The values, which this list holds."""
        return self

    @property
    def keys(self) -> list[bytes | None]:
        """The key of each record; None if it has none."""
        return self._column("keys", _key)

    @property
    def headers(self) -> list[Headers]:
        """The headers of each record: (key, value) in order; a key may occur more than once."""
        return self._column("headers", _headers)

    @property
    def timestamps_ms(self) -> npt.NDArray[np.int64]:
        """Unix milliseconds, int64, shape (n,); -1 if a record has no timestamp. See `Record.timestamp_ms`."""
        return np.array(self._column("timestamps_ms", _timestamp_ms), np.int64)

    def _column(self, name: str, of: Callable[[Envelope | None], _T]) -> list[_T]:
        if self._envelopes is None:
            raise TaskError(
                f"Records.{name}: expected a task that asks for more than values: write `whole_records = True` in its "
                "class"
            )
        return [of(envelope) for envelope in self._envelopes]


class _Whole:
    """The envelope of a `Record`."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def key(self) -> bytes | None:
        return self._record.key

    def headers(self) -> Headers:
        return self._record.headers

    def timestamp(self) -> tuple[int, int]:
        return int(self._record.timestamp_ms != NO_TIMESTAMP_MS), self._record.timestamp_ms


def record_of(value: bytes, envelope: Envelope | None, partition: int, offset: int) -> Record:
    """The record with this value."""
    return Record(value, _key(envelope), _headers(envelope), _timestamp_ms(envelope), partition, offset)


def envelope_bytes(envelope: Envelope) -> int:
    """Bytes of a record's key and headers."""
    named = sum(len(name) + len(value or b"") for name, value in _headers(envelope))
    return len(_key(envelope) or b"") + named


def _key(envelope: Envelope | None) -> bytes | None:
    return None if envelope is None else envelope.key()


def _headers(envelope: Envelope | None) -> Headers:
    return () if envelope is None else envelope.headers() or ()


def _timestamp_ms(envelope: Envelope | None) -> int:
    kind, stamp_ms = (0, NO_TIMESTAMP_MS) if envelope is None else envelope.timestamp()
    return stamp_ms if kind else NO_TIMESTAMP_MS
