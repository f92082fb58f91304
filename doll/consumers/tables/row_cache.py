"""A worker's cache of one table's rows: bounded, least recently used out first (approximately), never too old. Pure.

The rule (ESSP, Dai et al., AAAI 2015; it differs from the paper, whose `>` stops all workers at staleness 0): a row may
be used if it is known to be as it was in version v, and v is at least the grant's minimum version. The policy turns
clocks into versions. A row is known as of the version that it was fetched in, and as of later ones for which the server
has said that it has not changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from doll.errors import BlobError, IllegalEventError
from doll.storage.sections import RowRequest
from doll.tables.id_index import IdIndex
from doll.tables.rows import Floats, Ids, Patch, Rows, TableShape, add_in_order, add_where_equal, no_rows

_NO_IDS: Final[Ids] = np.empty(0, np.int64)
_PLACE_BYTES: Final = 8 + 8 + 1 + 9 + 16  # version, place in the index and its cells, beside the values


class OpLog:
    """A worker's own steps on one table that the rows it fetches may lack: INC, CLOCK and read-my-writes.

    Steps of one batch are one entry, with one row for each id (coalesced). An entry stays until the server's rows
    contain it: the server says of each version how many of the worker's batches it includes. Not thread-safe.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._open = no_rows(width)
        self._closed: deque[tuple[int, Rows]] = deque()  # (batch, its steps)

    def __len__(self) -> int:
        """Batches whose steps are kept, without the open one."""
        return len(self._closed)

    def inc(self, steps: Rows) -> None:
        """Add to the open batch's steps."""
        self._open = add_in_order([self._open, steps]) if len(self._open.ids) else steps

    def close(self, batch: int) -> Rows:
        """End the open batch (CLOCK); its steps, to be pushed.

        Raises:
            IllegalEventError: it is not.
        """
        if self._closed and batch <= self._closed[-1][0]:
            raise IllegalEventError(f"expected a batch after {self._closed[-1][0]}, got {batch}")
        rows, self._open = self._open, no_rows(self._width)
        self._closed.append((batch, rows))
        return rows

    def send_only(self, batch: int, sent: Rows) -> None:
        """Push only these steps of `batch`, the newest one.

        Raises:
            IllegalEventError: it is not.
        """
        if not self._closed or self._closed[-1][0] != batch:
            raise IllegalEventError(f"expected the newest batch, got {batch}")
        self._closed[-1] = (batch, sent)

    def forget(self, included: int) -> list[Rows]:
        """Take the steps below `included`, which rows fetched from now on contain; returns them by batch."""
        forgotten = []
        while self._closed and self._closed[0][0] < included:
            forgotten.append(self._closed.popleft()[1])
        return forgotten

    def take_back(self, batch: int) -> Ids:
        """Drop the steps of `batch`, later ones and the open one, to be computed again; returns the changed rows."""
        dropped = [self._open]
        while self._closed and self._closed[-1][0] >= batch:
            dropped.append(self._closed.pop()[1])
        self._open = no_rows(self._width)
        return np.unique(np.concatenate([rows.ids for rows in dropped]))

    def add_to(self, ids: Ids, rows: Floats, included: int) -> None:
        """Add to `rows`, in place, shape (n, width), the steps of batches from `included` on, in their order.

        Args:
            ids: of `rows`, strictly increasing.
            included: how many of the worker's batches `rows` contain.
        """
        entries = [steps for batch, steps in self._closed if batch >= included]
        for steps in (*entries, self._open):
            add_where_equal(ids, rows, steps)


def cached_row_bytes(width: int) -> int:
    """Memory for one row in a cache."""
    return 4 * width + _PLACE_BYTES


class FetchedRows(NamedTuple):
    """An answer of the server."""

    rows: Rows  # all rows that were asked for in full, and the known rows that have changed
    version: int  # that they are of
    included: int = 0  # how many of the worker's batches `version` contains
    patch: Patch | None = None  # what else has changed in known rows; None: `rows` is all


Fetch: TypeAlias = Callable[[RowRequest], FetchedRows]


class RowCache:
    """Rows of one table, with the worker's own steps on top (read-my-writes). Not thread-safe."""

    def __init__(self, shape: TableShape, max_bytes: int) -> None:
        """`max_bytes`: of the cache, without `own`. It holds one row at least."""
        self.own = OpLog(shape.width)  # steps that fetched rows may lack; `inc` adds to it and to the rows here
        self.num_hits = self.num_misses = 0  # rows that `get` has found here, and that it has fetched or asked about
        self._shape = shape
        self._capacity = capacity = max(1, min(shape.num_rows, max_bytes // cached_row_bytes(shape.width)))
        self._index = IdIndex(capacity)
        self._values = np.empty((capacity, shape.width), np.float32)
        self._version = np.full(capacity, -1, np.int64)  # that the row is known as of; -1: the place is free
        self._is_recent = np.zeros(capacity, np.bool_)
        self._num_used = 0
        self._hand = 0
        self.held = no_rows(shape.width)  # own steps that are not pushed: in the rows here, and in no row that comes
        self._newest = -1  # version of the newest grant, answer or push
        # Pushes that follow each other without a gap: a row that is known as of `_from` or later is known as of `_to`.
        self._from = self._to = -1

    def __len__(self) -> int:
        return self._num_used

    def no_rows(self) -> Rows:
        """Rows of this table without an id."""
        return no_rows(self._shape.width)

    @property
    def num_bytes(self) -> int:
        """The memory for rows, in bytes, whether they are there or not."""
        return self._capacity * cached_row_bytes(self._shape.width)

    def granted(self, version: int, included: int) -> None:
        """A grant says that `version` is the newest, and contains `included` of the worker's batches."""
        if version >= self._newest:
            self._newest = version
            self._forget(included)

    def get(self, ids: Ids, min_version: int, fetch: Fetch) -> Floats:
        """GET: rows `ids`, strictly increasing, as of `min_version` or later; float32, shape (n, width), a copy.

        `fetch` is called at most once, and not if all are here.

        Raises:
            BlobError: the answer is older than asked, or lacks rows: ask again.
        """
        out = np.empty((len(ids), self._shape.width), np.float32)
        slots = self._index.find(ids)
        is_here = slots >= 0
        known = np.where(is_here, self._known_as_of(slots), -1)
        is_fresh = is_here & (known >= min_version)
        out[is_fresh] = self._values[slots[is_fresh]]
        self._is_recent[slots[is_fresh]] = True
        self.num_hits += (hits := int(np.count_nonzero(is_fresh)))
        self.num_misses += len(ids) - hits
        if hits == len(ids):
            return out
        is_old = is_here & ~is_fresh
        since = int(known[is_old].min()) if is_old.any() else 0
        answer = self._checked(fetch(RowRequest(ids[~is_here], ids[is_old], since)), min_version)
        asked = ids[~is_fresh]
        at = np.minimum(np.searchsorted(answer.rows.ids, asked), max(len(answer.rows.ids) - 1, 0))
        has_come = answer.rows.ids[at] == asked if len(answer.rows.ids) else np.zeros(len(asked), np.bool_)
        if (lacking := ~has_come & ~is_here[~is_fresh]).any():
            raise BlobError(f"expected all rows that were asked for, got none for {np.count_nonzero(lacking)} of them")
        new = asked[has_come]
        values = answer.rows.values[at[has_come]]
        self._add_own(new, values, answer.included)
        fetched = np.empty((len(asked), self._shape.width), np.float32)
        fetched[has_come] = values
        old_slots = slots[~is_fresh]
        fetched[~has_come] = self._values[old_slots[~has_come]]  # as they were: own steps are on them already
        out[~is_fresh] = fetched
        self._put(asked, fetched, old_slots, answer.version)
        return out

    def inc(self, steps: Rows) -> None:
        """INC: add own steps to the open batch's, and to the rows that are here."""
        self.own.inc(steps)
        slots = self._index.find(steps.ids)
        is_here = slots >= 0
        self._values[slots[is_here]] += steps.values[is_here]

    def see(self, ids: Ids) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Rows as they are here, shape (n, width), a copy, and which of them are here; the others are without
        meaning. `See` of `doll.consumers.compute.significance_filter`."""
        slots = self._index.find(ids)
        return self._values[slots], slots >= 0

    def take_back(self, batch: int, also: Ids = _NO_IDS) -> None:
        """Own steps of `batch` and later ones do not count any more: rows with them, and rows `also`, are dropped."""
        self.drop(np.union1d(self.own.take_back(batch), also))

    def drop(self, ids: Ids) -> None:
        """Drop these rows, if they are here: they are not used any more."""
        self._drop(self._index.find(ids))

    def _checked(self, answer: FetchedRows, min_version: int) -> FetchedRows:
        if answer.version < (oldest := max(min_version, self._newest)):
            raise BlobError(f"expected rows of version {oldest} or later, got {answer.version}")
        self._newest = answer.version
        return answer

    def _forget(self, included: int) -> None:
        """The server's rows contain the steps of batches below `included`; those here contain all own steps."""
        self.own.forget(included)

    def _add_own(self, ids: Ids, values: Floats, included: int) -> None:
        self.own.add_to(ids, values, included)
        add_where_equal(ids, values, self.held)

    def merge(self, since: int, version: int, included: int, rows: Rows) -> bool:
        """The server pushes fetched rows that have changed after `since`, as of `version`.

        Only rows that are here are taken. False: it came late, after a later one, and is ignored.
        """
        if version < self._newest:
            return False
        self._newest = version
        self._forget(included)
        slots = self._index.find(rows.ids)
        is_here = slots >= 0
        slots, values = slots[is_here], rows.values[is_here]
        self._add_own(rows.ids[is_here], values, included)
        self._values[slots] = values
        self._version[slots] = version
        if not self._from <= since <= self._to:
            self._from = since
        self._to = version
        return True

    def clear(self) -> None:
        """Forget all rows, as for a new term: versions of an earlier one may be void. Own steps are forgotten too."""
        self._drop(np.flatnonzero(self._version >= 0))
        self.own, self.held = OpLog(self._shape.width), no_rows(self._shape.width)
        self._newest = self._from = self._to = -1

    def _known_as_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        version = self._version[slots]
        return np.where((version >= self._from) & (version < self._to), self._to, version)

    def _put(self, ids: Ids, values: Floats, slots: npt.NDArray[np.int64], version: int) -> None:
        """Keep rows; `slots` is -1 for rows without a place."""
        is_here = slots >= 0
        self._values[slots[is_here]] = values[is_here]
        self._version[slots[is_here]] = version
        self._is_recent[slots[is_here]] = True
        ids, values = ids[~is_here][-self._capacity :], values[~is_here][-self._capacity :]
        if not len(ids):
            return
        places = self._free_places(len(ids))
        self._index.insert(ids, places)
        self._values[places] = values
        self._version[places] = version
        self._is_recent[places] = True
        self._num_used += len(ids)

    def _free_places(self, count: int) -> npt.NDArray[np.int64]:
        """Places without rows; rows that were not used lately make room (the clock algorithm: a hand goes round, takes
        what has not been used since it was here last, and marks the rest as not used)."""
        places = np.empty(0, np.int64)
        while len(places) < count:
            end = min(self._hand + 2 * count + 64, self._capacity)
            is_next = ~self._is_recent[self._hand : end]
            taken = np.flatnonzero(is_next)[: count - len(places)]
            # The hand stops after the last one that it takes, if these are all.
            if len(places) + len(taken) == count:
                end = self._hand + int(taken[-1]) + 1
            self._is_recent[self._hand : end] = False
            taken += self._hand
            self._is_recent[taken] = True  # not to be taken twice
            places = np.concatenate([places, taken])
            self._hand = end % self._capacity
        self._drop(places[self._version[places] >= 0])
        return places

    def _drop(self, slots: npt.NDArray[np.int64]) -> None:
        slots = slots[slots >= 0]
        self._index.remove(slots)
        self._version[slots] = -1
        self._is_recent[slots] = False
        self._num_used -= len(slots)
