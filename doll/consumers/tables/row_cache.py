"""A worker's cache of rows of one table. It never returns rows that are too old. Its memory is limited: approximately
the least recently used rows are removed first. Pure.

The cache stores rows as the server has them, and adds the worker's own steps when a row is read. So a cached row
equals, to the bit, the server's row of some version. To bring a row to a later version, the cache adds the worker's own
pushes that this version includes. It also replaces rows, or values of rows (`Patch`), that other workers have changed.
A checksum over all rows of the request shows whether server and cache agree. If they do not, the complete rows are
requested again.

A row may be used if it is known up to version v and v is at least the grant's minimum version (ESSP, Dai et al., AAAI
2015). The paper's condition uses `>` instead, which would stop all workers at staleness 0. The policy converts clocks
to versions. A row that was fetched in version v is known up to v. If the server later reports that the row has not
changed up to a later version, the row is known up to that version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from doll.errors import BlobError, IllegalEventError
from doll.storage.sections import RowRequest
from doll.tables.id_index import IdIndex
from doll.tables.row_slices import row_slices
from doll.tables.rows import (
    Floats,
    Ids,
    Patch,
    Rows,
    TableShape,
    add_in_order,
    add_where_equal,
    checksum_of,
    found,
    no_rows,
    write_where_equal,
)

_MAX_VERSIONS: Final = 8  # maximum number of known versions in one request: each needs a section
_NO_IDS: Final[Ids] = np.empty(0, np.int64)
_PLACE_BYTES: Final = 8 + 8 + 2 + 9 + 16  # of version, marks, place in the index and its cells


class OpLog:
    """The own steps of a worker on one table that fetched rows may lack (INC, CLOCK and read-my-writes).

    The steps of one batch are one entry, with one row for each id (coalesced). An entry is kept until the server's rows
    contain it: for each version, the server reports how many of the worker's batches are included. Not thread-safe.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._open = no_rows(width)
        self._closed: deque[tuple[int, Rows]] = deque()  # (batch, its steps)

    def inc(self, steps: Rows) -> None:
        """Add steps to the steps of the open batch (INC)."""
        self._open = add_in_order([self._open, steps]) if len(self._open.ids) else steps

    def close(self, batch: int) -> Rows:
        """End the open batch (CLOCK), and return its steps to push. Raise IllegalEventError if `batch` is not later."""
        if self._closed and batch <= self._closed[-1][0]:
            raise IllegalEventError(f"expected a batch after {self._closed[-1][0]}, got {batch}")
        rows, self._open = self._open, no_rows(self._width)
        self._closed.append((batch, rows))
        return rows

    def send_only(self, batch: int, sent: Rows) -> None:
        """Reduce the steps of `batch` to the part `sent`. Raise IllegalEventError if `batch` is not the newest."""
        if not self._closed or self._closed[-1][0] != batch:
            raise IllegalEventError(f"expected the newest batch, got {batch}")
        self._closed[-1] = (batch, sent)

    def forget(self, included: int) -> list[Rows]:
        """Remove the steps of batches below `included`, which newly fetched rows contain, and return them in the order
        of batches."""
        forgotten = []
        while self._closed and self._closed[0][0] < included:
            forgotten.append(self._closed.popleft()[1])
        return forgotten

    def take_back(self, batch: int) -> None:
        """Drop the steps of `batch`, of later batches and of the open batch, which are computed again."""
        while self._closed and self._closed[-1][0] >= batch:
            self._closed.pop()
        self._open = no_rows(self._width)

    def add_to(self, ids: Ids, rows: Floats) -> None:
        """Add all steps in order to `rows`, in place, shape (n, width). `ids` are strictly ascending."""
        for steps in (*(steps for _, steps in self._closed), self._open):
            add_where_equal(ids, rows, steps)


def cached_row_bytes(width: int) -> int:
    return 4 * width + _PLACE_BYTES


class FetchedRows(NamedTuple):
    """An answer of the server."""

    rows: Rows  # all rows that were requested completely, and known rows that have changed
    version: int  # version of the rows
    included: int = 0  # number of the worker's batches in `version`
    # Of each shard, the other changed values of known rows; (): `rows` is complete.
    patches: tuple[Patch, ...] = ()


Fetch: TypeAlias = Callable[[RowRequest], FetchedRows]


class RowCache:
    """The cached rows of one table, read together with the worker's own steps (read-my-writes). Not thread-safe.

    Attributes:
        own: own steps that the cached rows lack.
        held: own steps that are held back. The cached rows lack these steps, too.
        num_hits, num_misses: number of rows that `get` found in the cache, and number of rows that it fetched or
            checked with the server.
        num_differences: number of answers whose checksum did not match.
    """

    def __init__(self, shape: TableShape, max_bytes: int) -> None:
        """Create an empty cache. `max_bytes` limits the memory of the cache, without `own`. There is always room for
        one row."""
        self.own = OpLog(shape.width)
        self.held = no_rows(shape.width)
        self.num_hits = self.num_misses = self.num_differences = 0
        self._shape = shape
        self._capacity = capacity = max(1, min(shape.num_rows, max_bytes // cached_row_bytes(shape.width)))
        self._index = IdIndex(capacity)
        self._values = np.empty((capacity, shape.width), np.float32)
        self._version = np.full(capacity, -1, np.int64)  # known version of the row; -1: the place is free
        self._is_recent = np.zeros(capacity, np.bool_)
        # The held-back steps of these rows were sent: ask the server about these rows before their next use.
        self._must_ask = np.zeros(capacity, np.bool_)
        self._num_used = 0
        self._hand = 0
        self._newest = -1  # version of the newest grant, answer or push
        # The server's pushes cover these versions without a gap: a row known up to `_from` or later is known to `_to`.
        self._from = self._to = -1

    def __len__(self) -> int:
        return self._num_used

    def no_rows(self) -> Rows:
        return no_rows(self._shape.width)

    @property
    def num_bytes(self) -> int:
        """The allocated memory for rows, in bytes, including free slots."""
        return self._capacity * cached_row_bytes(self._shape.width)

    def granted(self, version: int, included: int) -> None:
        """Record that a grant names `version` as the newest version, which includes the first `included` batches of the
        worker."""
        if version >= self._newest:
            self._newest = version
            self._forget(included)

    def get(self, ids: Ids, min_version: int, fetch: Fetch) -> Floats:
        """Return a copy of rows `ids` of `min_version` or later (GET), float32, shape (n, width). The copy includes the
        worker's own steps. `ids` are strictly ascending. `fetch` is not called if the cache has all rows of
        `min_version` or later, and need not ask the server about any of them. Raise BlobError if the answer is too old
        or lacks rows; the caller must then request the rows again."""
        slots = self._index.find(ids)
        is_here = slots >= 0
        version = self._version[slots]
        known = np.where((version >= self._from) & (version < self._to), self._to, version)
        known[~is_here] = -1
        is_fresh = is_here & (known >= min_version) & ~self._must_ask[slots]
        self.num_hits += (hits := int(np.count_nonzero(is_fresh)))
        self.num_misses += len(ids) - hits
        self._is_recent[slots[is_fresh]] = True
        asked, places = ids[~is_fresh], slots[~is_fresh]
        if len(asked):
            rows, newest = self._ask(asked, places, known[~is_fresh], min_version, fetch)
        out = self._values[slots]  # own pushes may have become a part of fresh rows since
        if len(asked):
            out[~is_fresh] = rows
            self._must_ask[places[places >= 0]] = False
            self._put(asked, rows, places, newest)
        self._add_own(ids, out)
        return out

    def see(self, ids: Ids) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return a copy of the rows as this worker sees them, shape (n, width), and a mask of the rows that are in the
        cache. The values of the other rows have no meaning. This is `See` of `doll.optim.significance_filter`."""
        slots = self._index.find(ids)
        rows = self._values[slots]
        self._add_own(ids, rows)
        return rows, slots >= 0

    def must_ask(self, ids: Ids) -> None:
        """Ask the server about these rows before they are used again."""
        slots = self._index.find(ids)
        self._must_ask[slots[slots >= 0]] = True

    def merge(self, since: int, version: int, included: int, rows: Rows) -> bool:
        """Merge rows that the server has sent: the rows of `version` that have changed after version `since`.

        Rows that are not in the cache are ignored. If the cache already has a later version, ignore all of these rows
        and return False.
        """
        if version < self._newest:
            return False
        self._newest = version
        self._forget(included)
        slots = self._index.find(rows.ids)
        is_here = slots >= 0
        slots = slots[is_here]
        self._values[slots] = rows.values[is_here]
        self._version[slots] = version
        self._must_ask[slots] = False
        if not self._from <= since <= self._to:
            self._from = since
        self._to = version
        return True

    def _ask(
        self, ids: Ids, slots: npt.NDArray[np.int64], known: npt.NDArray[np.int64], min_version: int, fetch: Fetch
    ) -> tuple[Floats, int]:
        """Return rows `ids` of the newest version, and that version. `slots` is -1 for rows that are not in the
        cache."""
        is_here = slots >= 0
        answer = self._checked(fetch(RowRequest(ids[~is_here], ids[is_here], _few(known[is_here]))), min_version)
        rows = self._values[slots]
        if answer.patches and not _are_patched(ids, rows, is_here, answer.rows, answer.patches):
            self.num_differences += 1
            answer = self._checked(fetch(RowRequest(ids, _NO_IDS)), min_version)
            is_here = np.zeros(len(ids), np.bool_)
        has_come = write_where_equal(ids, rows, answer.rows)
        if (lacking := ~has_come & ~is_here).any():
            raise BlobError(f"expected all rows that were asked for, got none for {np.count_nonzero(lacking)} of them")
        return rows, answer.version

    def _checked(self, answer: FetchedRows, min_version: int) -> FetchedRows:
        if answer.version < (oldest := max(min_version, self._newest)):
            raise BlobError(f"expected rows of version {oldest} or later, got {answer.version}")
        self._newest = answer.version
        self._forget(answer.included)
        return answer

    def _forget(self, included: int) -> None:
        """Add the own steps of batches below `included` to the cached rows, because the server's rows contain them."""
        for steps in self.own.forget(included):
            slots = self._index.find(steps.ids)
            is_here = slots >= 0
            self._values[slots[is_here]] += steps.values[is_here]

    def _add_own(self, ids: Ids, rows: Floats) -> None:
        """Add the own steps that the server's rows lack."""
        self.own.add_to(ids, rows)
        add_where_equal(ids, rows, self.held)

    def clear(self) -> None:
        """Drop all rows and own steps for a new term, because versions of an earlier term may be void."""
        self._drop(np.flatnonzero(self._version >= 0))
        self.own, self.held = OpLog(self._shape.width), no_rows(self._shape.width)
        self._newest = self._from = self._to = -1

    def _put(self, ids: Ids, values: Floats, slots: npt.NDArray[np.int64], version: int) -> None:
        """Store rows. `slots` is -1 for rows that have no slot yet."""
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
        """Return slots without rows, after removing rows that were not used recently. (Clock algorithm: a hand moves
        over the slots in a circle. It frees the slots that were not used since its last visit, and marks the other
        slots as not used.)"""
        places = np.empty(0, np.int64)
        while len(places) < count:
            end = min(self._hand + 2 * count + 64, self._capacity)
            is_next = ~self._is_recent[self._hand : end]
            taken = np.flatnonzero(is_next)[: count - len(places)]
            # The hand stops after the last place that it takes, if these are enough.
            if len(places) + len(taken) == count:
                end = self._hand + int(taken[-1]) + 1
            self._is_recent[self._hand : end] = False
            taken += self._hand
            self._is_recent[taken] = True  # so that the next round does not take it again
            places = np.concatenate([places, taken])
            self._hand = end % self._capacity
        self._drop(places[self._version[places] >= 0])
        return places

    def _drop(self, slots: npt.NDArray[np.int64]) -> None:
        slots = slots[slots >= 0]
        self._index.remove(slots)
        self._version[slots] = -1
        self._is_recent[slots] = self._must_ask[slots] = False
        self._num_used -= len(slots)


def _few(versions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return `versions` with at most `_MAX_VERSIONS` different values; the oldest version replaces the others."""
    different = sorted(set(versions.tolist()))
    if len(different) <= _MAX_VERSIONS:
        return versions
    return np.where(versions < different[1 - _MAX_VERSIONS], different[0], versions)


def _are_patched(
    ids: Ids, rows: Floats, is_here: npt.NDArray[np.bool_], whole: Rows, patches: Sequence[Patch]
) -> bool:  # fmt: skip
    """Change those of `rows` that are in the cache to the server's rows, in place. Return whether they are equal
    now."""
    write_where_equal(ids, rows, whole)
    for patch, part in zip(patches, row_slices(len(patches)), strict=True):
        is_in, at = found(patch.ids, ids)
        if not is_in.all():
            return False
        patched = rows[at]
        patched.reshape(-1)[np.flatnonzero(patch.is_there)] = patch.values
        rows[at] = patched
        if checksum_of(rows[is_here & part.has(ids)]) != patch.checksum:
            return False
    return True
