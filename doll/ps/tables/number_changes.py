"""A record of the numbers in rows that other workers have changed: answers to a worker contain only these. Pure.

A worker knows its rows as of an older version and its own later pushes. From these it can compute every number that no
other worker has changed, to the bit.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from doll.tables.rows import grown

Slots = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NOBODY: Final = 0  # the author of a change that no worker can compute by itself
_MAX_AUTHORS: Final = 2**16 - 1


class Authors:
    """The numbers of worker processes as authors of changes, from 1 on."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def number(self, worker: int, session: int) -> int:
        """Return the number of this worker process. Return `NOBODY` if there are too many processes; then answers to
        the process also contain its own changes."""
        key = worker, session
        if key not in self._numbers and len(self._numbers) < _MAX_AUTHORS:
            self._numbers[key] = len(self._numbers) + 1
        return self._numbers.get(key, NOBODY)


class NumberChanges:
    """The last change of each number of a table's touched rows, by their slots (`TouchedRows`). Not thread-safe.

    Each number takes 10 bytes: the version and the author of its last change, and the version of the last change by
    any other author. Versions are kept as differences to `start`, in 32 bits.
    """

    def __init__(self, width: int, start: int) -> None:
        """`start`: version in which each number counts as changed, until its first change."""
        self._start = start
        self._at = np.zeros((0, width), np.uint32)
        self._author = np.zeros((0, width), np.uint16)
        self._by_others = np.zeros((0, width), np.uint32)

    def note(self, slots: Slots, is_changed: Bools, version: int, author: int) -> None:
        """Note that `author` changes these numbers in `version`, the newest one. `is_changed`: shape (len(slots),
        width); each slot occurs once. Raises OverflowError 2^32 versions after `start`."""
        self._make_room(int(slots.max(initial=-1)) + 1)
        width = self._at.shape[1]
        places = (slots[:, None] * width + np.arange(width)).reshape(-1)[np.flatnonzero(is_changed)]
        at, authors, by_others = self._at.reshape(-1), self._author.reshape(-1), self._by_others.reshape(-1)
        is_other = places[authors[places] != author]
        by_others[is_other] = at[is_other]
        authors[is_other] = author
        at[places] = np.uint32(version - self._start)

    def since(self, slots: Slots, since: npt.NDArray[np.int64], author: int) -> Bools:
        """Return which numbers other authors have changed after each row's version `since`, shape (n, width)."""
        self._make_room(int(slots.max(initial=-1)) + 1)
        at = self._at[slots]
        if author != NOBODY:
            at = np.where(self._author[slots] == author, self._by_others[slots], at)
        is_changed: Bools = at.astype(np.int64) > (since - self._start)[:, None]
        return is_changed

    def _make_room(self, num_slots: int) -> None:
        if num_slots > (before := len(self._at)):
            for name in ("_at", "_author", "_by_others"):
                setattr(self, name, grown(getattr(self, name), max(num_slots, 2 * before)))
