"""What happens to the processes of a run on one machine, in its folder: its topics tell of no broker's restart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from doll.monitor.state.json_lines import JsonLines
from doll.monitor.state.watched_job import ProcessEvent

_FILE: Final = "events.jsonl"


def append_event(folder: Path, event: ProcessEvent) -> None:
    """Write one more. Where that fails, for a full disk, the run goes on without."""
    with contextlib.suppress(OSError), (folder / _FILE).open("ab") as file:
        file.write(msgspec.json.encode(event) + b"\n")


class EventLog:
    """Follows the events in a folder, which may have none."""

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / _FILE)

    def read(self) -> Iterator[ProcessEvent]:
        """The events since the last call."""
        for entry in self._lines.read():
            with contextlib.suppress(msgspec.ValidationError):
                yield msgspec.convert(entry, ProcessEvent)
