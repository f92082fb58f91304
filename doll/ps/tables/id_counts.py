"""How often ids have been named, in memory that does not grow: a count-min sketch that ages. Pure.

Cormode and Muthukrishnan (2005), with conservative update (Estan and Varghese, 2002), and halved now and then, as the
sketch of TinyLFU (Einziger, Friedman, Manes, 2017). An estimate is never below the id's count since the sketch was
made, halved as often as the sketch; with four rows of at least 8 cells for each row of the table, halved every 2 counts
for each row of the table, it is more than 1 above it with a probability below 2 %.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from doll.tables.bounds import mixed
from doll.tables.rows import Ids

NUM_HASHES: Final = 4
_CELLS_PER_ROW: Final = 8
_COUNTS_PER_ROW: Final = 2
_HALF: Final = np.uint64(32)


class IdCounts:
    """The counts of ids of a table of at most `max_rows` rows. Not thread-safe.

    Attributes:
        cells: uint8, shape (NUM_HASHES, a power of two).
        num_added: counts since the cells were halved.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_added = _COUNTS_PER_ROW * max_rows
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
