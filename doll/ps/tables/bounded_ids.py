"""The ids of a bounded table that have rows: admitted when they have been named often enough, evicted if there is no
room, expired when they are not named any more. Pure.

Everything is decided by the ids that updates name, in the order of the updates: a replay decides the same. The ids with
the lowest counts are evicted, of these the ones whose last use is the longest ago. All counts are halved now and then
(LFU with ageing, as TinyLFU), so that an id that was frequent long ago makes room.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.tables.bounds import TableBounds, mixed
from doll.tables.id_index import IdIndex
from doll.tables.rows import Ids

NUM_HASHES: Final = 4
_CELLS_PER_ROW: Final = 8
_SKETCH_COUNTS_PER_ROW: Final = 2
_HALF: Final = np.uint64(32)


class IdCounts:
    """How often ids of a table of at most `max_rows` rows have been named, in memory that does not grow: a count-min
    sketch that ages. Not thread-safe.

    Cormode and Muthukrishnan (2005), with conservative update (Estan and Varghese, 2002), and halved now and then, as
    the sketch of TinyLFU (Einziger, Friedman, Manes, 2017). An estimate is never below the id's count since the sketch
    was made, halved as often as the sketch; with four rows of at least 8 cells for each row of the table, halved every
    2 counts for each row of the table, it is more than 1 above it with a probability below 2 %.

    Attributes:
        cells: uint8, shape (NUM_HASHES, a power of two).
        num_added: counts since the cells were halved.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_added = _SKETCH_COUNTS_PER_ROW * max_rows
        self.cells = np.zeros((NUM_HASHES, 1 << (_CELLS_PER_ROW * max_rows - 1).bit_length()), np.uint8)
        self.num_added = 0

    def add(self, ids: Ids, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Count `ids`, no one twice, so many times each; their estimates, of 255 at most."""
        hashes = mixed(ids.astype(np.uint64))
        first, step, mask = hashes >> _HALF, hashes | np.uint64(1), np.uint64(self.cells.shape[1] - 1)
        places = [((first + np.uint64(row) * step) & mask).astype(np.int64) for row in range(NUM_HASHES)]
        least = np.minimum.reduce([cells[place] for cells, place in zip(self.cells, places, strict=True)])
        estimates: npt.NDArray[np.int64] = np.minimum(least + counts, 255)
        for cells, place in zip(self.cells, places, strict=True):
            np.maximum.at(cells, place, estimates.astype(np.uint8))
        self.num_added += int(counts.sum())
        if self.num_added >= self._max_added:
            self.cells >>= 1
            self.num_added = 0
        return estimates


Slots = npt.NDArray[np.int64]

FREE: Final = -1
_COUNTS_PER_ROW: Final = 8  # between two times that all counts are halved
_AT_ONCE: Final = (
    64  # one in so many rows is evicted at once, and ttl_updates is looked at so often: a look at all costs
)
_MAX_RANKED: Final = 2**22 - 1  # of a count, beside 2^40 versions in 63 bits


class Totals(NamedTuple):
    """The totals of a bounded table since the job began."""

    rows: int  # that there are now
    admitted: int
    evicted: int
    expired: int
    refused: int  # gradients of ids without a row


class BoundedIds:
    """The ids that have rows, each with the slot of its row. Not thread-safe.

    Attributes:
        lost: ids whose rows were taken are added to it; None: nobody asks.
    """

    def __init__(self, bounds: TableBounds) -> None:
        self.lost: list[Ids] | None = None
        self._bounds = bounds
        size = bounds.max_rows
        self._index = IdIndex(size)
        self._counts = np.zeros(size, np.int64)
        self._touched = np.full(size, FREE, np.int64)  # version of the last update that has named the id
        self._free: Slots = np.arange(size)  # sorted: what a restart finds
        self._num_slots = 0  # that have ever been used
        self._waiting = IdCounts(size) if bounds.min_count > 1 else None
        self._num_counted = 0  # since all counts were halved
        self._admitted = self._evicted = self._expired = self._refused = 0

    @property
    def num_slots(self) -> int:
        """Slots are below it."""
        return self._num_slots

    @property
    def totals(self) -> Totals:
        rows = self._bounds.max_rows - len(self._free)
        return Totals(rows, self._admitted, self._evicted, self._expired, self._refused)

    def find(self, ids: Ids) -> Slots:
        """The slot of each id; -1 if it has no row."""
        return self._index.find(ids)

    def ids_of(self, slots: Slots) -> Ids:
        """The ids of slots that are in use."""
        return self._index.ids[slots]

    def last_touch(self, slots: Slots) -> npt.NDArray[np.int64]:
        """The version in which the row of each slot was changed last."""
        return self._touched[slots]

    def begin_with(self, ids: Ids, counts: npt.NDArray[np.int64]) -> Slots:
        """Give rows to these ids, `max_rows` at most and strictly increasing, as if version 0 had named them so often.

        Returns their slots. No id has a row before.
        """
        return self._admit(ids, counts, 0)

    def expire(self, version: int) -> None:
        """Take the rows of ids that no update has named for more than `ttl_updates` updates."""
        ttl = self._bounds.ttl_updates
        if ttl is None or version % max(1, ttl // _AT_ONCE):
            return
        slots = np.flatnonzero((self._touched != FREE) & (self._touched < version - ttl))
        self._expired += len(slots)
        self._take(slots)

    def name(self, ids: Ids, counts: npt.NDArray[np.int64], version: int) -> Slots:
        """The update that makes `version` names `ids`, strictly increasing, so many times each.

        Returns the slots of ids that have got a row now.
        """
        slots = self._index.find(ids)
        is_here = slots >= 0
        self._counts[slots[is_here]] += counts[is_here]
        self._touched[slots[is_here]] = version
        new, counts_of_new = ids[~is_here], counts[~is_here]
        estimates = counts_of_new if self._waiting is None else self._waiting.add(new, counts_of_new)
        wanted = estimates >= self._bounds.min_count
        places = np.flatnonzero(wanted)
        places = places[self._make_room(estimates[places], version)]
        admitted = self._admit(new[places], estimates[places], version)
        self._refused += int(counts_of_new.sum() - counts_of_new[places].sum())
        self._num_counted += int(counts.sum())
        if self._num_counted >= _COUNTS_PER_ROW * self._bounds.max_rows:
            self._counts >>= 1
            self._num_counted = 0
        return admitted

    def _make_room(self, counts: npt.NDArray[np.int64], version: int) -> npt.NDArray[np.int64]:
        """Have free slots for ids with these counts, or for as many as possible; which of them, in order."""
        if len(counts) > len(self._free):
            self._evict(len(counts) - len(self._free), version)
        if len(counts) <= len(self._free):
            return np.arange(len(counts))
        # All others are in use in this update: the most frequent ones get rows.
        return np.sort(np.argsort(-counts, kind="stable")[: len(self._free)])

    def _admit(self, ids: Ids, counts: npt.NDArray[np.int64], version: int) -> Slots:
        slots, self._free = self._free[: len(ids)], self._free[len(ids) :]
        self._index.insert(ids, slots)
        self._counts[slots] = counts
        self._touched[slots] = version
        self._num_slots = max(self._num_slots, int(slots.max(initial=-1)) + 1)
        self._admitted += len(ids)
        return slots

    def _evict(self, count: int, version: int) -> None:
        """Take `count` rows at least, or all that this update does not name."""
        slots = np.flatnonzero((self._touched != FREE) & (self._touched < version))
        count = max(count, self._bounds.max_rows // _AT_ONCE)
        if len(slots) > count:
            ranks = (np.minimum(self._counts[slots], _MAX_RANKED) << 40) | self._touched[slots]
            last = np.partition(ranks, count - 1)[count - 1]
            is_taken = ranks < last
            ties = np.flatnonzero(ranks == last)
            is_taken[ties[: count - int(np.count_nonzero(is_taken))]] = True  # of equal ones, the first slots
            slots = slots[is_taken]
        self._evicted += len(slots)
        self._take(slots)

    def _take(self, slots: Slots) -> None:
        if self.lost is not None:
            self.lost.append(self._index.ids[slots])
        self._index.remove(slots)
        self._counts[slots] = 0
        self._touched[slots] = FREE
        self._free = np.sort(np.concatenate([self._free, slots]))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, npt.NDArray[np.int64] | npt.NDArray[np.uint8]]:
        """All of it, copied. `ids` is -1 in slots without a row."""
        used = slice(0, self._num_slots)
        counters = [self._num_counted, *self.totals[1:], 0 if self._waiting is None else self._waiting.num_added]
        touched = self._touched[used].copy()
        tensors: dict[str, npt.NDArray[np.int64] | npt.NDArray[np.uint8]] = {
            "ids": np.where(touched == FREE, FREE, self._index.ids[used]),
            "counts": self._counts[used].copy(), "last_touch": touched, "counters": np.array(counters, np.int64),
        }  # fmt: skip
        return tensors if self._waiting is None else tensors | {"waiting": self._waiting.cells.copy()}

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
