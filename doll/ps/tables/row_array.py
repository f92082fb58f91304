"""Rows that can change while a reader still sees their earlier content (copy on write, by row). Pure.

A separate thread writes a checkpoint while updates continue. For this thread, `hold` returns the memory itself without
a copy. Rows that change during this time are stored separately, until no view of the returned array exists any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from doll.tables.rows import Floats, Ids, grown


class RowArray:
    """Float32 rows of one width, whose number can grow. Not thread-safe; arrays from `hold` are for any thread."""

    def __init__(self, values: Floats) -> None:
        """`values`: float32, shape (num_rows, width), C-contiguous. The array is used directly, not copied."""
        if values.dtype != np.float32 or values.ndim != 2 or not values.flags.c_contiguous:
            raise ValueError(
                f"expected contiguous float32 of shape (num_rows, width), got {values.dtype} of shape {values.shape}"
            )
        self._memory = values
        self._num_rows = len(values)
        self._held: Callable[[], npt.NDArray[Any] | None] | None = None  # weak reference to the array of `hold`
        self._num_held = 0
        self._moved_ids: Ids = np.empty(0, np.int64)
        self._moved = np.empty((0, self.width), np.float32)
        self._num_moved = 0
        self._place = np.empty(0, np.int32)  # for each held row: 1 + its index in `_moved`; 0: the row has not changed

    def __len__(self) -> int:
        return self._num_rows

    @property
    def width(self) -> int:
        return int(self._memory.shape[1])

    def read(self, ids: Ids) -> Floats:
        """Return a copy of these rows, float32, shape (n, width)."""
        self._settle()
        rows = self._memory[ids]
        if self._num_moved:
            is_held = ids < self._num_held
            place = np.where(is_held, self._place[np.where(is_held, ids, 0)], 0)
            at = np.flatnonzero(place)
            rows[at] = self._moved[place[at] - 1]
        return rows

    def write(self, ids: Ids, rows: Floats) -> None:
        """Set these rows to `rows`, shape (n, width). No row occurs twice in `ids`."""
        self._settle()
        if self._held is None:
            self._memory[ids] = rows
            return
        is_held = ids < self._num_held
        self._memory[ids[~is_held]] = rows[~is_held]
        ids, rows = ids[is_held], rows[is_held]
        place = self._place[ids]
        is_new = place == 0
        count = int(np.count_nonzero(is_new))
        self._make_room(self._num_moved + count)
        place[is_new] = np.arange(self._num_moved + 1, self._num_moved + count + 1)
        self._moved_ids[self._num_moved : self._num_moved + count] = ids[is_new]
        self._num_moved += count
        self._place[ids] = place
        self._moved[place - 1] = rows

    def extend(self, num_rows: int) -> None:
        """Extend the array to at least `num_rows` rows; new rows are zero."""
        if num_rows <= self._num_rows:
            return
        if num_rows > len(self._memory):
            memory = np.zeros((max(num_rows, 2 * len(self._memory)), self.width), np.float32)
            self._copy_to(memory)
            self._memory = memory
            self._let_go()
        self._num_rows = num_rows

    def replace(self, values: Floats) -> None:
        """Replace all rows by a copy of `values`, float32, shape (any number, width)."""
        self._settle()
        if self._held is not None or len(values) > len(self._memory):
            self._memory = np.zeros(values.shape, np.float32)
            self._let_go()
        self._memory[: len(values)] = values
        self._memory[len(values) :] = 0.0
        self._num_rows = len(values)

    def hold(self) -> Floats:
        """Return all current rows, float32, shape (num_rows, width), read-only. The result does not change.

        The result is a copy only if an earlier result still exists and rows have changed since.
        """
        self._settle()
        shape = (self._num_rows, self.width)
        if not self._num_rows:
            return np.empty(shape, np.float32)
        if self._held is not None:
            held = self._held()
            if held is not None and not self._num_moved and self._num_held == self._num_rows:
                return held.reshape(shape)
            copied = np.empty(shape, np.float32)
            self._copy_to(copied)
            copied.flags.writeable = False
            return copied
        # This array's memory comes from a buffer. Every view of such an array has the array as its base, however the
        # view is made. So the array exists as long as any view of it.
        owner = np.frombuffer(self._memory[: self._num_rows].data.cast("B"), np.float32)
        owner.flags.writeable = False
        self._held, self._num_held = weakref.ref(owner), self._num_rows
        if len(self._place) < self._num_rows:
            self._place = np.zeros(self._num_rows, np.int32)
        return owner.reshape(shape)

    def _settle(self) -> None:
        """Copy changed rows back into the memory, if no held array exists any more."""
        if self._held is not None and self._held() is None:
            moved = self._moved_ids[: self._num_moved]
            self._memory[moved] = self._moved[: self._num_moved]
            self._let_go()

    def _let_go(self) -> None:
        self._place[self._moved_ids[: self._num_moved]] = 0
        self._held, self._num_held, self._num_moved = None, 0, 0
        self._moved_ids, self._moved = np.empty(0, np.int64), np.empty((0, self.width), np.float32)

    def _copy_to(self, memory: Floats) -> None:
        memory[: self._num_rows] = self._memory[: self._num_rows]
        memory[self._moved_ids[: self._num_moved]] = self._moved[: self._num_moved]

    def _make_room(self, num_moved: int) -> None:
        if num_moved > len(self._moved):
            room = min(max(num_moved, 2 * len(self._moved)), self._num_held)
            self._moved_ids, self._moved = grown(self._moved_ids, room), grown(self._moved, room)
