"""The log of the tasks of a virtual worker's stages, a file in the run folder. doll-lab reads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from doll.pipeline.runtime.messages import StageTask

_MAX_BATCHES: Final = 1_000


class TaskLog:
    """A log of the tasks of a process's first batches, one line of JSON per batch; a new process overwrites it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._left = _MAX_BATCHES
        self._encoder = msgspec.json.Encoder()

    def add(self, tasks: Sequence[StageTask]) -> None:
        """Add the tasks of one batch, at all stages."""
        if self._left and not self._file.closed:
            self._left -= 1
            self._file.write(self._encoder.encode(tasks) + b"\n")
            if not self._left:
                self._file.close()

    def close(self) -> None:
        self._file.close()
