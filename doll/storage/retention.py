"""Which checkpoints of a job are kept: the newest, one of each hour for a week, those with an alias or a pin. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple


class StoredVersion(NamedTuple):
    """A checkpoint that a store holds, whole or not."""

    term: int
    version: int
    saved_s: float  # Unix time
    size_bytes: int

    @property
    def key(self) -> tuple[int, int]:
        return self.term, self.version


class VersionHistory(NamedTuple):
    """Beside the newest ones, one checkpoint of each `every_s` seconds is kept for `for_s` seconds; 0: none is."""

    every_s: float = 0.0
    for_s: float = 0.0


NO_HISTORY: Final = VersionHistory()


def obsolete(
    stored: Sequence[StoredVersion], marked: Collection[int], *, keep: int, history: VersionHistory, now_s: float
) -> list[StoredVersion]:
    """Those that may be deleted.

    What is kept for the history depends on the oldest that is kept, so that the same ones are kept each time.

    Args:
        stored: oldest first.
        marked: versions with an alias or a pin.
        keep: how many of the newest are kept.
    """
    gone: list[StoredVersion] = []
    last_kept_s = float("-inf")
    for item in stored[: max(len(stored) - keep, 0)]:
        is_of_history = now_s - item.saved_s <= history.for_s and item.saved_s - last_kept_s >= history.every_s
        if is_of_history and history.for_s:
            last_kept_s = item.saved_s
        elif item.version not in marked:
            gone.append(item)
    return gone
