"""Files of a run folder besides its tables. Events of processes and decisions of the provisioner, which are not in the
topics, are lines of JSON. The newest updates, with the offsets of their batches, are for details on the page."""

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
_TAIL_BYTES: Final = 4_000_000  # read from the end of an existing file
_READ_BYTES: Final = 4_000_000  # at a time


def append_event(folder: Path, event: ProcessEvent) -> None:
    """Append an event. If this fails (for example on a full disk), the run continues without the event."""
    with contextlib.suppress(OSError), (folder / _EVENTS).open("ab") as file:
        file.write(msgspec.json.encode(event) + b"\n")


class _JsonLines:
    """Follows a file to which other processes append JSON objects, one per line. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = -1  # -1: not opened yet
        self._rest = b""

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the objects since the last call; invalid or incomplete lines are skipped."""
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
    """Follows the events in a folder, which may contain none."""

    def __init__(self, folder: Path) -> None:
        self._lines = _JsonLines(folder / _EVENTS)

    def read(self) -> Iterator[ProcessEvent]:
        """Yield the events since the last call."""
        for entry in self._lines.read():
            with contextlib.suppress(msgspec.ValidationError):
                yield msgspec.convert(entry, ProcessEvent)


class DecisionLog:
    """Follows `provision-<job>.jsonl` in a folder. The file need not exist yet."""

    def __init__(self, folder: Path, job: str) -> None:
        self._lines = _JsonLines(FileStateStore(folder, job).journal)

    def read(self) -> Iterator[Mapping[str, Any]]:
        """Yield the decisions since the last call; invalid or incomplete lines are skipped."""
        for entry in self._lines.read():
            if entry.get("kind") == "decision" and isinstance(entry.get("actions"), list):
                yield entry


def save_updates(folder: Path, updates: Sequence[Update]) -> None:
    """Save the updates in the folder of a run.

    Raises:
        OSError: the folder cannot be written.
    """
    write_atomically(folder / _UPDATES, msgspec.msgpack.encode(list(updates)))


def saved_updates(folder: Path) -> list[Update]:
    """Return the saved updates; none if the file does not exist.

    Raises:
        msgspec.MsgspecError: the file does not have the format of this release.
    """
    try:
        with (folder / _UPDATES).open("rb") as file:
            return msgspec.msgpack.decode(file.read(_MAX_UPDATES_BYTES), type=list[Update])
    except OSError:
        return []
