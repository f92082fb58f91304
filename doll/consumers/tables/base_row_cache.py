"""A worker's cache of rows as the server has them, of which the server sends the numbers that have changed. Pure.

Own steps are added when a row is read, and are in no row that is kept. So a row is the server's of a version, to the
bit, and becomes that of a later one by two things: the worker's own pushes that the later one includes, and the numbers
that others have changed meanwhile (`Patch`). A checksum over all rows that the worker has says whether the two agree;
if they do not, the rows are asked for again, whole.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from doll.consumers.tables.row_cache import Fetch, RowCache
from doll.errors import BlobError
from doll.storage.sections import RowRequest
from doll.tables.rows import Floats, Ids, Patch, Rows, TableShape, add_where_equal, checksum_of
from doll.telemetry import get_logger

log = get_logger(__name__)

_MAX_VERSIONS: Final = 8  # that the rows of one request are known as of: each takes a section
_NO_IDS: Final[Ids] = np.empty(0, np.int64)


class BaseRowCache(RowCache):
    """`RowCache` whose rows are without own steps. Not thread-safe."""

    def __init__(self, shape: TableShape, max_bytes: int) -> None:
        super().__init__(shape, max_bytes)
        self.num_differences = 0  # answers whose checksum did not fit
        # What was held back of these rows has left: before the next use the server is asked about them.
        self._must_ask = np.zeros(self._capacity, np.bool_)

    def get(self, ids: Ids, min_version: int, fetch: Fetch) -> Floats:
        slots = self._index.find(ids)
        is_here = slots >= 0
        known = np.where(is_here, self._known_as_of(slots), -1)
        is_fresh = is_here & (known >= min_version) & ~self._must_ask[slots]
        self.num_hits += (hits := int(np.count_nonzero(is_fresh)))
        self.num_misses += len(ids) - hits
        self._is_recent[slots[is_fresh]] = True
        asked, places = ids[~is_fresh], slots[~is_fresh]
        if len(asked):
            rows, version = self._ask(asked, places, known[~is_fresh], min_version, fetch)
        out = self._values[slots]  # own pushes may have become a part of fresh rows meanwhile
        if len(asked):
            out[~is_fresh] = rows
            self._must_ask[places[places >= 0]] = False
            self._put(asked, rows, places, version)
        self._add_open(ids, out)
        return out

    def inc(self, steps: Rows) -> None:
        self.own.inc(steps)

    def see(self, ids: Ids) -> tuple[Floats, npt.NDArray[np.bool_]]:
        slots = self._index.find(ids)
        rows = self._values[slots]
        self._add_open(ids, rows)
        return rows, slots >= 0

    def take_back(self, batch: int, also: Ids = _NO_IDS) -> None:
        self.own.take_back(batch)  # no row has them

    def drop(self, ids: Ids) -> None:
        slots = self._index.find(ids)
        self._must_ask[slots[slots >= 0]] = True

    def merge(self, since: int, version: int, included: int, rows: Rows) -> bool:
        is_taken = super().merge(since, version, included, rows)
        if is_taken:
            slots = self._index.find(rows.ids)
            self._must_ask[slots[slots >= 0]] = False
        return is_taken

    def _ask(
        self, ids: Ids, slots: npt.NDArray[np.int64], known: npt.NDArray[np.int64], min_version: int, fetch: Fetch
    ) -> tuple[Floats, int]:
        """Rows `ids` of the newest version, and that version; `slots` is -1 for rows that are not here."""
        is_here = slots >= 0
        answer = self._checked(fetch(RowRequest(ids[~is_here], ids[is_here], _few(known[is_here]))), min_version)
        self._forget(answer.included)
        rows = self._values[slots]
        if answer.patch is not None and not _is_patched(ids, rows, is_here, answer.rows, answer.patch):
            self.num_differences += 1
            log.warning("rows_differ", rows=len(ids), action="they are asked for again, whole")
            answer = self._checked(fetch(RowRequest(ids, _NO_IDS)), min_version)
            self._forget(answer.included)
            is_here = np.zeros(len(ids), np.bool_)
        has_come = _write(ids, rows, answer.rows)
        if (lacking := ~has_come & ~is_here).any():
            raise BlobError(f"expected all rows that were asked for, got none for {np.count_nonzero(lacking)} of them")
        return rows, answer.version

    def _forget(self, included: int) -> None:
        for steps in self.own.forget(included):
            slots = self._index.find(steps.ids)
            is_here = slots >= 0
            self._values[slots[is_here]] += steps.values[is_here]

    def _add_own(self, ids: Ids, values: Floats, included: int) -> None:
        pass  # when they are read

    def _add_open(self, ids: Ids, rows: Floats) -> None:
        """Add what the server's rows lack."""
        self.own.add_to(ids, rows, 0)
        add_where_equal(ids, rows, self.held)

    def _drop(self, slots: npt.NDArray[np.int64]) -> None:
        self._must_ask[slots[slots >= 0]] = False
        super()._drop(slots)


def _few(versions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`versions` with at most `_MAX_VERSIONS` different ones: the oldest in place of others."""
    different = sorted(set(versions.tolist()))
    if len(different) <= _MAX_VERSIONS:
        return versions
    return np.where(versions < different[1 - _MAX_VERSIONS], different[0], versions)


def _is_patched(ids: Ids, rows: Floats, is_here: npt.NDArray[np.bool_], whole: Rows, patch: Patch) -> bool:
    """Make those of `rows` that are here the server's, in place; whether they are its rows now."""
    _write(ids, rows, whole)
    at = np.minimum(np.searchsorted(ids, patch.ids), len(ids) - 1)
    if not (ids[at] == patch.ids).all():
        return False
    patched = rows[at]
    patched.reshape(-1)[np.flatnonzero(patch.is_there)] = patch.values
    rows[at] = patched
    return checksum_of(rows[is_here]) == patch.checksum


def _write(ids: Ids, rows: Floats, other: Rows) -> npt.NDArray[np.bool_]:
    """Put rows of `other` in the place of `rows` with the same id; which ones these are, shape (len(ids),)."""
    if not len(other.ids):
        return np.zeros(len(ids), np.bool_)
    at = np.minimum(np.searchsorted(other.ids, ids), len(other.ids) - 1)
    has_come: npt.NDArray[np.bool_] = other.ids[at] == ids
    rows[has_come] = other.values[at[has_come]]
    return has_come
