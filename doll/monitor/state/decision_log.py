"""The decisions in a provisioner's journal, read as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from doll.monitor.state.json_lines import JsonLines
from doll.provisioner.state_store import FileStateStore


class DecisionLog:
    """Follows `provision-<job>.jsonl` in a folder, which may not be there yet."""

    def __init__(self, folder: Path, job: str) -> None:
        self._lines = JsonLines(FileStateStore(folder, job).journal)

    def read(self) -> Iterator[Mapping[str, Any]]:
        """The decisions since the last call; a line that is no decision, or is cut off, is skipped."""
        for entry in self._lines.read():
            if entry.get("kind") == "decision" and isinstance(entry.get("actions"), list):
                yield entry
