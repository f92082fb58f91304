"""Every event of one parameter server, kept in a file: the run can be replayed to the bit.

The file is a sequence of length-prefixed MessagePack entries, each one event with its time and, for a fetched
gradient, its blob. The first entry is what the server started from: the checkpoint, or the origins of a new job.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from doll.errors import RecordError
from doll.ps.engine.events import Event
from doll.ps.start import Start
from doll.records.bounded import short
from doll.storage.blobs import Buffer

_LENGTH: Final = struct.Struct("<I")
T = TypeVar("T")


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """One event, its time on the server's monotonic clock (seconds), and its gradient blob or b\"\"."""

    event: Event
    now: float
    gradient: bytes = b""


class FileEventLog:
    """Writes entries to `path`, which must not exist. An entry survives the end of the process, also by SIGKILL."""

    def __init__(self, path: Path, start: Start) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb", buffering=0)
        self._encoder = msgspec.msgpack.Encoder()
        self._append(start)

    def write(self, event: Event, now: float, gradient: Buffer | None = None) -> None:
        self._append(LogEntry(event, now, b"" if gradient is None else bytes(gradient)))

    def _append(self, item: Start | LogEntry) -> None:
        data = self._encoder.encode(item)
        self._file.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> tuple[Start, Iterator[LogEntry]]:
    """What the server of an event log started from, and its entries; a torn last entry (it was killed) ends them.

    Raises:
        RecordError: it is not an event log of this build; of an entry, when its turn comes.
    """
    items = _items(path)
    start = _decode(next(items, b""), Start, path)
    return start, (_decode(data, LogEntry, path) for data in items)


def _items(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        left = path.stat().st_size
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            left -= _LENGTH.size + length
            if left < 0:  # a torn entry, or a damaged length
                return
            data = file.read(length)
            yield data


def _decode(data: bytes, kind: type[T], path: Path) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RecordError(f"{path}: not an event log of this build: {short(exc)}") from exc
