"""The newest updates of a run, with the offsets of their batches, in its folder: its page opens them later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from doll.process.files import write_atomically
from doll.records.control import Update

_FILE: Final = "newest_updates.msgpack"
_MAX_BYTES: Final = 64_000_000


def save_updates(folder: Path, updates: Sequence[Update]) -> None:
    """Keep them in the folder of a run.

    Raises:
        OSError: the folder cannot be written.
    """
    write_atomically(folder / _FILE, msgspec.msgpack.encode(list(updates)))


def saved_updates(folder: Path) -> list[Update]:
    """Those that were kept; none where there is no such file.

    Raises:
        msgspec.MsgspecError: the file is not as this release writes it.
    """
    try:
        with (folder / _FILE).open("rb") as file:
            return msgspec.msgpack.decode(file.read(_MAX_BYTES), type=list[Update])
    except OSError:
        return []
