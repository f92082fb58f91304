"""The bounds of a table with more possible ids than memory can hold: only some ids have stored rows. Pure.

The initial row of an id is computed from the seed of the job, the table's name and the id alone, with integer
arithmetic that is the same on every machine.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from doll.tables.rows import Floats, Ids

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's output function (Steele, Lea, Flood, OOPSLA 2014): each bit depends on all input bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class InitialRows(NamedTuple):
    """The initial rows of one table: uniform numbers from -scale up to scale.

    Attributes:
        key: hash of the job's seed and the table's name.
    """

    key: int
    width: int
    scale: float

    def rows(self, ids: Ids) -> Floats:
        """Return the initial rows of `ids`, float32, shape (n, width)."""
        begin = mixed(ids.astype(np.uint64) + np.uint64(self.key))
        places = np.arange(1, self.width + 1, dtype=np.uint64) * _GAMMA
        # float32 represents integers of 24 bits exactly, and also the results below, except the last one.
        bits = (mixed(begin[:, None] + places) >> np.uint64(40)).astype(np.float32)
        return (bits * np.float32(2.0**-23) - np.float32(1.0)) * np.float32(self.scale)


def initial_rows(seed: int, name: str, width: int, scale: float) -> InitialRows:
    """Return the initial rows of the table `name` of a job with this seed."""
    key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return InitialRows(int.from_bytes(key, "little"), width, scale)


class TableBounds(NamedTuple):
    """The bounds of a bounded table.

    Attributes:
        max_rows: maximum number of ids that have rows at the same time.
        min_count: number of pushes that must name an id before it gets a row.
        ttl_updates: a row expires after this number of updates without a push of its id; None: no row expires.
    """

    max_rows: int
    min_count: int
    ttl_updates: int | None
    initial: InitialRows


class FirstRows(NamedTuple):
    """The first rows of a bounded table, if a job begins with given weights (`training.init_from`).

    Attributes:
        ids: int64, shape (n,), strictly increasing.
        values: float32, shape (n, width).
        counts: int64, shape (n,): count with which each id begins, as if pushes had named it.
    """

    ids: Ids
    values: Floats
    counts: npt.NDArray[np.int64]


def part_name(table: str, part: str) -> str:
    """Return the name of the tensor with the ids, the rows or the counts of a bounded table in a file or a source.

    >>> part_name("items.weight", "ids")
    'items.ids'
    """
    return table.removesuffix("weight") + part
