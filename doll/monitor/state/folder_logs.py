"""Files of a run's folder beside its tables: events of its processes and decisions of its provisioner, line by line, of
which its topics do not tell; and its newest updates with the offsets of their batches, which its page opens later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from doll.monitor.state.watched_job import ProcessEvent
from doll.process.files import write_atomically
from doll.provisioner.state_store import FileStateStore
from doll.records.bounded import json_object
from doll.records.control import Update

_EVENTS: Final = "events.jsonl"
_UPDATES: Final = "newest_updates.msgpack"
_MAX_UPDATES_BYTES: Final = 64_000_000
_TAIL_BYTES: Final = 4_000_000  # that are read of a file which is there already
_READ_BYTES: Final = 4_000_000  # at a time


def append_event(folder: Path, event: ProcessEvent) -> None:
    """Write one more. If that fails, for a full disk, the run goes on without it."""
    with contextlib.suppress(OSError), (folder / _EVENTS).open("ab") as file:
        file.write(msgspec.json.encode(event) + b"\n")


class _JsonLines:
    """Follows a file to which others append JSON objects, one in a line; it may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = -1  # -1: not opened yet
        self._rest = b""

    def read(self) -> Iterator[dict[str, Any]]:
        """The objects since the last call; a line that is none, or is cut off, is skipped."""
        try:
            with self._path.open("rb") as file:
                if self._position < 0:
                    self._position = max(0, file.seek(0, 2) - _TAIL_BYTES)
                file.seek(self._position)
                data = file.read(_READ_BYTES)
        except OSError:
            return
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                yield json_object(line)
            except ValueError:
                continue


class EventLog:
    """Follows the events in a folder, which may have none."""

    def __init__(self, folder: Path) -> None:
        self._lines = _JsonLines(folder / _EVENTS)

    def read(self) -> Iterator[ProcessEvent]:
        """The events since the last call."""
        for entry in self._lines.read():
            with contextlib.suppress(msgspec.ValidationError):
                yield msgspec.convert(entry, ProcessEvent)


class DecisionLog:
    """Follows `provision-<job>.jsonl` in a folder, which may not be there yet."""

    def __init__(self, folder: Path, job: str) -> None:
        self._lines = _JsonLines(FileStateStore(folder, job).journal)

    def read(self) -> Iterator[Mapping[str, Any]]:
        """The decisions since the last call; a line that is no decision, or is cut off, is skipped."""
        for entry in self._lines.read():
            if entry.get("kind") == "decision" and isinstance(entry.get("actions"), list):
                yield entry


def save_updates(folder: Path, updates: Sequence[Update]) -> None:
    """Keep them in the folder of a run.

    Raises:
        OSError: the folder cannot be written.
    """
    write_atomically(folder / _UPDATES, msgspec.msgpack.encode(list(updates)))


def saved_updates(folder: Path) -> list[Update]:
    """The updates that were kept; none if there is no such file.

    Raises:
        msgspec.MsgspecError: the file is not as this release writes it.
    """
    try:
        with (folder / _UPDATES).open("rb") as file:
            return msgspec.msgpack.decode(file.read(_MAX_UPDATES_BYTES), type=list[Update])
    except OSError:
        return []
