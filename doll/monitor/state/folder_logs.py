"""What goes into a run's folder line by line, read as it comes: its processes' events, its provisioner's decisions.

Its topics tell of no broker's restart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from doll.monitor.state.watched_job import ProcessEvent
from doll.provisioner.state_store import FileStateStore
from doll.records.bounded import json_object

_EVENTS: Final = "events.jsonl"
_TAIL_BYTES: Final = 4_000_000  # that are read of a file which is there already
_READ_BYTES: Final = 4_000_000  # at a time


def append_event(folder: Path, event: ProcessEvent) -> None:
    """Write one more. Where that fails, for a full disk, the run goes on without."""
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
