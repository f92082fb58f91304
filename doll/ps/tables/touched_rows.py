"""An index of the rows that have changed at all, or since a version. It replaces a search through all rows. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from doll.errors import IllegalEventError
from doll.tables.rows import Ids, grown

NEVER: Final = -1  # version of the last change if the row has never changed
_MIN_LOG: Final = 1024


class TouchedRows:
    """The rows that updates have changed. Each has a *slot*, by which its optimizer state is stored.

    A log lists the changed rows of each version. The log is shortened when it has more than two entries for each
    touched row. So a change takes constant time on average, and the time of a query is proportional to the number of
    later changes.
    """

    def __init__(self, num_rows: int) -> None:
        self._slot = np.zeros(num_rows, np.int32)  # 1 + slot; 0: never touched. Pages of zeros take no memory.
        self._ids: Ids = np.empty(0, np.int64)
        self._changed = np.empty(0, np.int64)
        self._num = 0
        self._versions: list[int] = []
        self._log: list[npt.NDArray[np.int64]] = []  # slots; the arrays do not change
        self._log_entries = 0

    def __len__(self) -> int:
        return self._num

    @property
    def ids(self) -> Ids:
        """The row of each slot, int64, shape (len,): a read-only view that does not change."""
        ids = self._ids[: self._num]
        ids.flags.writeable = False
        return ids

    def note_change(self, ids: Ids, version: int) -> npt.NDArray[np.int64]:
        """Note that rows `ids`, which are distinct, change in `version`. Return their slots. Raises IllegalEventError
        if the version is lower than the version of an earlier change."""
        if self._versions and version < self._versions[-1]:
            raise IllegalEventError(f"expected a change in version {self._versions[-1]} or later, got {version}")
        slots = self._slot[ids].astype(np.int64) - 1
        is_new = slots < 0
        count = int(np.count_nonzero(is_new))
        if count:
            self._make_room(self._num + count)
            slots[is_new] = np.arange(self._num, self._num + count)
            self._ids[self._num : self._num + count] = ids[is_new]
            self._slot[ids[is_new]] = slots[is_new] + 1
            self._num += count
        self._changed[slots] = version
        if self._versions and self._versions[-1] == version:
            self._log[-1] = np.union1d(self._log[-1], slots)
        elif len(ids):
            self._versions.append(version)
            self._log.append(slots)
        self._log_entries += len(ids)
        if self._log_entries > 2 * self._num + _MIN_LOG:
            self._shorten()
        return slots

    def slots(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the slots of `ids`, all of which have changed."""
        return self._slot[ids].astype(np.int64) - 1

    def last_change(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the version in which each of `ids` changed last; `NEVER` for rows that have not changed."""
        slots = self._slot[ids]
        changed = np.full(len(ids), NEVER, np.int64)
        is_touched = slots > 0
        changed[is_touched] = self._changed[slots[is_touched] - 1]
        return changed

    def changed_since(self, version: int) -> Ids:
        """Return the rows that have changed after `version`, sorted."""
        first = bisect_right(self._versions, version)
        pieces = [
            slots[self._changed[slots] == changed]
            for changed, slots in zip(self._versions[first:], self._log[first:], strict=True)
        ]
        return np.sort(self._ids[np.concatenate(pieces)]) if pieces else np.empty(0, np.int64)

    def history(self) -> Callable[[int], npt.NDArray[np.int64]]:
        """Return a function that returns the slots of the rows that have changed after a version until now, sorted. Any
        thread may call it, also after later changes."""
        versions, log = [*self._versions], [*self._log]

        def since(version: int) -> npt.NDArray[np.int64]:
            pieces = log[bisect_right(versions, version) :]
            return np.unique(np.concatenate(pieces)) if pieces else np.empty(0, np.int64)

        return since

    def load(self, ids: Ids, version: int) -> None:
        """Replace the touched rows by `ids`, in the order of their slots; all count as changed in `version`."""
        self._slot[self._ids[: self._num]] = 0
        self._num, self._log_entries, self._versions, self._log = 0, 0, [], []
        self.note_change(ids, version)

    def _shorten(self) -> None:
        order = np.argsort(self._changed[: self._num], kind="stable")
        changed = self._changed[order]
        begins = [0, *(np.flatnonzero(changed[1:] != changed[:-1]) + 1).tolist(), len(changed)]
        self._versions = [int(changed[begin]) for begin in begins[:-1]]
        self._log = [order[begin:end] for begin, end in pairwise(begins)]
        self._log_entries = self._num

    def _make_room(self, num: int) -> None:
        if num > len(self._ids):
            room = max(num, 2 * len(self._ids))
            self._ids, self._changed = grown(self._ids, room), grown(self._changed, room)
