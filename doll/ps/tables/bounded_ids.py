"""The ids of a bounded table that have rows. Pure. An id is admitted when updates have named it often enough. It is
evicted if its row is needed for another id. It expires when updates have not named it for some time.

All decisions depend only on the ids that updates name and on the order of the updates, so a replay makes the same
decisions. The ids with the lowest counts are evicted; among equal counts, the id whose last use is the longest ago
comes first. All counts are halved from time to time (LFU with ageing, as in TinyLFU), so that ids that were frequent
long ago are evicted as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.storage.differences import ChangedRows
from doll.tables.bounds import TableBounds, mixed
from doll.tables.id_index import IdIndex
from doll.tables.rows import Ids

NUM_HASHES: Final = 4
_CELLS_PER_ROW: Final = 8
_SKETCH_COUNTS_PER_ROW: Final = 2
_CELLS_PER_BLOCK: Final = 32  # a changed cell is stored with its block
_HALF: Final = np.uint64(32)


class IdCounts:
    """Counts of the ids of a table with at most `max_rows` rows, in constant memory: a count-min sketch with ageing.
    Not thread-safe.

    The sketch is that of Cormode and Muthukrishnan (2005), with conservative update (Estan and Varghese, 2002). Its
    counts are halved regularly, as in TinyLFU (Einziger, Friedman, Manes, 2017). The sketch has four rows, each with at
    least 8 * `max_rows` cells. All cells are halved after every 2 * `max_rows` counts. An estimate is never below the
    true count, halved as often as the cells. It is more than 1 too high with a probability below 2 %.

    Attributes:
        cells: uint8, shape (NUM_HASHES, a power of two).
        changed: version of the last change of each `block` of cells.
        num_added: number of counts since the cells were last halved.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_added = _SKETCH_COUNTS_PER_ROW * max_rows
        self.cells = np.zeros((NUM_HASHES, 1 << (_CELLS_PER_ROW * max_rows - 1).bit_length()), np.uint8)
        self.num_added = 0
        self.block = min(_CELLS_PER_BLOCK, self.cells.shape[1])
        self.changed = np.zeros((NUM_HASHES, self.cells.shape[1] // self.block), np.int64)

    def add(self, ids: Ids, counts: npt.NDArray[np.int64], version: int = 0) -> npt.NDArray[np.int64]:
        """Count each of the distinct `ids` in `version` as often as `counts` says, and return the estimates, at most
        255."""
        hashes = mixed(ids.astype(np.uint64))
        first, step, mask = hashes >> _HALF, hashes | np.uint64(1), np.uint64(self.cells.shape[1] - 1)
        places = [((first + np.uint64(row) * step) & mask).astype(np.int64) for row in range(NUM_HASHES)]
        least = np.minimum.reduce([cells[place] for cells, place in zip(self.cells, places, strict=True)])
        estimates: npt.NDArray[np.int64] = np.minimum(least + counts, 255)
        for cells, changed, place in zip(self.cells, self.changed, places, strict=True):
            np.maximum.at(cells, place, estimates.astype(np.uint8))
            changed[place // self.block] = version
        self.num_added += int(counts.sum())
        if self.num_added >= self._max_added:
            self.cells >>= 1
            self.changed[:] = version
            self.num_added = 0
        return estimates


Slots = npt.NDArray[np.int64]

FREE: Final = -1
_COUNTS_PER_ROW: Final = 8  # counts per row of the table between two halvings
_AT_ONCE: Final = (
    64  # a 64th of the rows is evicted at once; expiry, which looks at all rows, is checked 64 times per ttl_updates
)
_MAX_RANKED: Final = 2**22 - 1  # highest count in a rank, which has 63 bits with 2^40 versions


class Totals(NamedTuple):
    """The totals of a bounded table since the job began."""

    rows: int  # current number of rows
    admitted: int
    evicted: int
    expired: int
    refused: int  # number of dropped gradients, of ids without a row


class BoundedIds:
    """The ids that have rows, each with the slot of its row. Not thread-safe.

    Attributes:
        lost: list to which ids are added when they lose their rows; None: such ids are not recorded.
    """

    def __init__(self, bounds: TableBounds) -> None:
        self.lost: list[Ids] | None = None
        self._bounds = bounds
        size = bounds.max_rows
        self._index = IdIndex(size)
        self._counts = np.zeros(size, np.int64)
        self._touched = np.full(size, FREE, np.int64)  # by slot: version of the last update that has named the id
        self._changed = np.zeros(size, np.int64)  # by slot: version in which its row or id has changed last
        self._halved = 0  # version in which all counts were halved last
        self._free: Slots = np.arange(size)  # sorted, as after a restart
        self._num_slots = 0  # number of slots that have ever been used
        self._waiting = IdCounts(size) if bounds.min_count > 1 else None
        self._num_counted = 0  # number of counts since all counts were halved
        self._admitted = self._evicted = self._expired = self._refused = 0

    @property
    def num_slots(self) -> int:
        """The number of slots; all slots are below it."""
        return self._num_slots

    @property
    def totals(self) -> Totals:
        rows = self._bounds.max_rows - len(self._free)
        return Totals(rows, self._admitted, self._evicted, self._expired, self._refused)

    def find(self, ids: Ids) -> Slots:
        """Return the slot of each id; -1 for ids without a row."""
        return self._index.find(ids)

    def ids_of(self, slots: Slots) -> Ids:
        """Return the ids of slots that are in use."""
        return self._index.ids[slots]

    def last_touch(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Return, for each slot, the version in which its row was changed last."""
        return self._touched[slots]

    def begin_with(self, ids: Ids, counts: npt.NDArray[np.int64]) -> Slots:
        """Give rows to these ids, as if version 0 had named each id as often as `counts` says.

        `ids`: strictly increasing, at most `max_rows`; no id has a row before. Return their slots.
        """
        return self._admit(ids, counts, 0)

    def expire(self, version: int) -> None:
        """Remove the rows of ids that no update has named for more than `ttl_updates` updates."""
        ttl = self._bounds.ttl_updates
        if ttl is None or version % max(1, ttl // _AT_ONCE):
            return
        slots = np.flatnonzero((self._touched != FREE) & (self._touched < version - ttl))
        self._expired += len(slots)
        self._take(slots, version)

    def name(self, ids: Ids, counts: npt.NDArray[np.int64], version: int) -> Slots:
        """Note that the update to `version` names each id (strictly increasing) as often as `counts` says.

        Return the slots of the ids that get a row by this call.
        """
        slots = self._index.find(ids)
        is_here = slots >= 0
        self._counts[slots[is_here]] += counts[is_here]
        self._touched[slots[is_here]] = self._changed[slots[is_here]] = version
        new, counts_of_new = ids[~is_here], counts[~is_here]
        estimates = counts_of_new if self._waiting is None else self._waiting.add(new, counts_of_new, version)
        wanted = estimates >= self._bounds.min_count
        places = np.flatnonzero(wanted)
        places = places[self._make_room(estimates[places], version)]
        admitted = self._admit(new[places], estimates[places], version)
        self._refused += int(counts_of_new.sum() - counts_of_new[places].sum())
        self._num_counted += int(counts.sum())
        if self._num_counted >= _COUNTS_PER_ROW * self._bounds.max_rows:
            self._counts >>= 1
            self._num_counted, self._halved = 0, version
        return admitted

    def _make_room(self, counts: npt.NDArray[np.int64], version: int) -> npt.NDArray[np.int64]:
        """Free slots for as many of the ids with these counts as possible. Return the positions in `counts` of the ids
        that get a slot."""
        if len(counts) > len(self._free):
            self._evict(len(counts) - len(self._free), version)
        if len(counts) <= len(self._free):
            return np.arange(len(counts))
        # All rows are used in this update: the most frequent new ids get the free slots.
        return np.sort(np.argsort(-counts, kind="stable")[: len(self._free)])

    def _admit(self, ids: Ids, counts: npt.NDArray[np.int64], version: int) -> Slots:
        slots, self._free = self._free[: len(ids)], self._free[len(ids) :]
        self._index.insert(ids, slots)
        self._counts[slots] = counts
        self._touched[slots] = self._changed[slots] = version
        self._num_slots = max(self._num_slots, int(slots.max(initial=-1)) + 1)
        self._admitted += len(ids)
        return slots

    def _evict(self, count: int, version: int) -> None:
        """Remove at least `count` rows, or all rows that this update does not name."""
        slots = np.flatnonzero((self._touched != FREE) & (self._touched < version))
        count = max(count, self._bounds.max_rows // _AT_ONCE)
        if len(slots) > count:
            ranks = (np.minimum(self._counts[slots], _MAX_RANKED) << 40) | self._touched[slots]
            last = np.partition(ranks, count - 1)[count - 1]
            is_taken = ranks < last
            ties = np.flatnonzero(ranks == last)
            is_taken[ties[: count - int(np.count_nonzero(is_taken))]] = True  # among equal ranks, the first slots
            slots = slots[is_taken]
        self._evicted += len(slots)
        self._take(slots, version)

    def _take(self, slots: Slots, version: int) -> None:
        if self.lost is not None:
            self.lost.append(self._index.ids[slots])
        self._index.remove(slots)
        self._counts[slots] = 0
        self._touched[slots] = FREE
        self._changed[slots] = version
        self._free = np.sort(np.concatenate([self._free, slots]))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, npt.NDArray[np.int64] | npt.NDArray[np.uint8]]:
        """Return all arrays as copies. `ids` is -1 in slots without a row."""
        used = slice(0, self._num_slots)
        counters = [self._num_counted, *self.totals[1:], 0 if self._waiting is None else self._waiting.num_added]
        touched = self._touched[used].copy()
        tensors: dict[str, npt.NDArray[np.int64] | npt.NDArray[np.uint8]] = {
            "ids": np.where(touched == FREE, FREE, self._index.ids[used]),
            "counts": self._counts[used].copy(), "last_touch": touched, "counters": np.array(counters, np.int64),
        }  # fmt: skip
        return tensors if self._waiting is None else tensors | {"waiting": self._waiting.cells.copy()}

    def row_changes(self) -> Callable[[int], dict[str, ChangedRows]]:
        """Return a function that returns the changes of the arrays of `tensors` after a version, as they are now."""
        changed, halved = self._changed[: self._num_slots].copy(), self._halved
        waiting = None if self._waiting is None else (self._waiting.changed.reshape(-1).copy(), self._waiting.block)

        def since(version: int) -> dict[str, ChangedRows]:
            slots = ChangedRows(np.flatnonzero(changed > version), 1)
            parts = dict.fromkeys(("ids", "last_touch"), slots)
            if halved <= version:
                parts["counts"] = slots
            if waiting is not None:
                parts["waiting"] = ChangedRows(np.flatnonzero(waiting[0] > version), waiting[1])
            return parts

        return since

    def load(
        self,
        ids: Ids,
        counts: npt.NDArray[np.int64],
        last_touch: npt.NDArray[np.int64],
        counters: npt.NDArray[np.int64],
        waiting: npt.NDArray[np.uint8] | None,
    ) -> None:
        self.__init__(self._bounds)  # type: ignore[misc]
        slots = np.flatnonzero(ids != FREE)
        self._index.insert(ids[slots], slots)
        self._num_slots = len(ids)
        self._counts[: len(ids)], self._touched[: len(ids)] = counts, last_touch
        self._free = np.flatnonzero(self._touched == FREE)
        self._num_counted, self._admitted, self._evicted, self._expired, self._refused, num_added = counters.tolist()
        if self._waiting is not None and waiting is not None:
            self._waiting.cells[:], self._waiting.num_added = waiting, num_added
