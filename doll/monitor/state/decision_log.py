"""The decisions in a provisioner's journal, read as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from doll.provisioner.state_store import FileStateStore
from doll.records.bounded import json_object

_TAIL_BYTES: Final = 4_000_000  # that are read of a journal which is there already
_READ_BYTES: Final = 4_000_000  # at a time


class DecisionLog:
    """Follows `provision-<job>.jsonl` in a folder, which may not be there yet."""

    def __init__(self, folder: Path, job: str) -> None:
        self._path = FileStateStore(folder, job).journal
        self._position = -1  # -1: not opened yet
        self._rest = b""

    def read(self) -> Iterator[Mapping[str, Any]]:
        """The decisions since the last call; a line that is no decision, or is cut off, is skipped."""
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
                entry = json_object(line)
            except ValueError:
                continue
            if entry.get("kind") == "decision" and isinstance(entry.get("actions"), list):
                yield entry
