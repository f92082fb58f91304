"""A file to which others append JSON objects, one in a line, read as they come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from doll.records.bounded import json_object

_TAIL_BYTES: Final = 4_000_000  # that are read of a file which is there already
_READ_BYTES: Final = 4_000_000  # at a time


class JsonLines:
    """Follows a file, which may not be there yet."""

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
