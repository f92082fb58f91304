"""A hash table from ids to slots, made of numpy arrays, without loops over ids. Pure.

It uses open addressing with linear probing. A cell contains the number of a slot, and a slot contains its id. For each
id of the capacity, cells take 8 to 16 bytes and slots 9 bytes. The cell of a removed id stays marked until all cells
are rebuilt.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from doll.tables.rows import Ids

_EMPTY: Final = -1
_REMOVED: Final = -2
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio (Knuth, vol. 3, 6.4)


class IdIndex:
    """The slots of ids, for up to `capacity` ids. Not thread-safe.

    Attributes:
        ids: int64, shape (capacity,): the id of each slot that is in use.
    """

    def __init__(self, capacity: int) -> None:
        bits = (max(2 * capacity, 16) - 1).bit_length()
        self.ids: Ids = np.zeros(capacity, np.int64)
        self._is_used = np.zeros(capacity, np.bool_)
        self._cells = np.full(1 << bits, _EMPTY, np.int32)
        self._num_marked = 0  # number of cells that are not empty
        self._shift = np.uint64(64 - bits)
        self._mask = (1 << bits) - 1

    def find(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the slot of each of `ids`, shape (n,); -1 for ids without a slot."""
        slots = np.full(len(ids), -1, np.int64)
        left, cells = np.arange(len(ids)), self._home(ids)
        while len(left):
            here = self._cells[cells]
            is_it = (here >= 0) & (self.ids[np.maximum(here, 0)] == ids[left])
            slots[left[is_it]] = here[is_it]
            goes_on = ~is_it & (here != _EMPTY)
            left, cells = left[goes_on], (cells[goes_on] + 1) & self._mask
        return slots

    def insert(self, ids: Ids, slots: npt.NDArray[np.int64]) -> None:
        """Give each of `ids` one of the free `slots`. The ids are distinct, and none has a slot yet."""
        self.ids[slots] = ids
        self._is_used[slots] = True
        if self._num_marked + len(ids) > 3 * len(self._cells) // 4:
            self._cells.fill(_EMPTY)
            slots = np.flatnonzero(self._is_used)
            self._num_marked = 0
        self._num_marked += len(slots)
        left, cells = slots, self._home(self.ids[slots])
        while len(left):
            is_free = self._cells[cells] == _EMPTY
            self._cells[cells[is_free]] = left[is_free]  # if several ids want the same cell, one of them gets it
            has_none = self._cells[cells] != left
            left, cells = left[has_none], (cells[has_none] + 1) & self._mask

    def remove(self, slots: npt.NDArray[np.int64]) -> None:
        """Free these slots, each of which has an id."""
        self._is_used[slots] = False
        left, cells = slots, self._home(self.ids[slots])
        while len(left):
            is_it = self._cells[cells] == left
            self._cells[cells[is_it]] = _REMOVED
            left, cells = left[~is_it], (cells[~is_it] + 1) & self._mask

    def _home(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the cell at which the search for each id begins."""
        return ((ids.astype(np.uint64) * _MULTIPLIER) >> self._shift).astype(np.int64)
