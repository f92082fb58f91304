"""A table at the parameter server whose ids are too many for a row each: rows are made, evicted and expire.

An id without a row is read as its initial row, which is computed from the id; gradients of it are dropped and counted.
So a row that is evicted is read as its initial row again, and one that is admitted begins with it.

Contributions are gradients: under policies whose workers send steps, a worker would keep its own step on a row that the
server refuses (docs/decisions/0084).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.errors import CheckpointError
from doll.optim.row_optimizer import RowOptimizer
from doll.ps.tables.bounded_ids import FREE, BoundedIds, Totals
from doll.ps.tables.number_changes import NOBODY
from doll.ps.tables.table_parts import RowAnswer, StoredTable, stored_tensor, tensor_name
from doll.storage.sections import RowRequest
from doll.tables.bounds import FirstRows, TableBounds
from doll.tables.rows import Floats, Ids, Rows, TableShape

_FORMAT: Final = 1


class BoundedTable(StoredTable):
    """A table of at most `bounds.max_rows` rows."""

    def __init__(
        self, name: str, shape: TableShape, bounds: TableBounds, optimizer: RowOptimizer, first: FirstRows | None = None
    ) -> None:
        """
        Args:
            shape: its `num_rows` is the number of ids that there may be.
            first: what it begins with; None: no id has a row.
        """
        super().__init__(name, np.zeros((0, shape.width), np.float32), optimizer)
        self.shape = shape
        self._bounds = bounds
        self._ids = BoundedIds(bounds)
        self._changed: list[Ids] | None = None  # None: nobody asks
        if first is not None:
            slots = self._ids.begin_with(first.ids, first.counts)
            self._begin(slots)
            self._values.write(slots, first.values)

    @property
    def totals(self) -> Totals:
        return self._ids.totals

    def read(self, ids: Ids) -> Rows:
        """GET: these rows as they are now; a copy."""
        slots = self._ids.find(ids)
        is_here = slots >= 0
        values = np.empty((len(ids), self.shape.width), np.float32)
        values[is_here] = self._values.read(slots[is_here])
        values[~is_here] = self._bounds.initial.rows(ids[~is_here])
        return Rows(ids, values)

    def answer(self, request: RowRequest, author: int = NOBODY) -> RowAnswer:
        """The rows of `request.ids`, and of `request.known` those that may have changed after `request.since`, whoever
        has changed them: a known id without a row may have lost it since, so it is sent."""
        known = request.known
        slots = self._ids.find(known)
        last_touch = np.where(slots >= 0, self._ids.last_touch(slots), self._version + 1)
        is_of_term = np.less_equal(request.since, self._version)  # a later one is of an earlier term, and void
        changed = known[(last_touch > request.since) | ~is_of_term]
        return RowAnswer(self.read(np.union1d(request.ids, changed) if len(changed) else request.ids))

    def follow(self, is_followed: bool = True) -> None:
        """Follow changes: from now on, `changes` says what has changed since; False: nobody asks any more."""
        self._changed = self._ids.lost = [] if is_followed else None

    def changes(self) -> Rows:
        """The rows that have changed since the last call or `follow`; initial ones for ids that have lost theirs."""
        changed = self._changed or []
        self.follow()
        return self.read(np.unique(np.concatenate(changed)) if changed else np.empty(0, np.int64))

    def apply(self, scale: float, version: int, authors: Mapping[int, int] | None = None) -> None:
        """Make the rows of `version`: expire rows, admit ids, and one step on `scale` times the gradients' sum. Raises
        DivergedError if a number is not finite."""
        self._version = version
        self._ids.expire(version)
        if not self._pending:
            return
        # A stable sort merges what is sorted.
        named = np.sort(np.concatenate([item.rows.ids for item in self._pending]), kind="stable")
        first = np.flatnonzero(np.diff(named, prepend=-1))
        self._begin(self._ids.name(named[first], np.diff(first, append=len(named)), version))
        ids, total = self._take_sum()
        slots = self._ids.find(ids)
        is_here = slots >= 0
        slots, total = slots[is_here], total[is_here]
        if not len(slots):
            return
        if self._changed is not None:
            self._changed.append(ids[is_here])
        self._step(slots, slots, total, scale)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """All arrays by name, for a checkpoint. They stay as they are while updates go on."""
        tensors: dict[str, npt.NDArray[Any]] = {
            "bounded": np.array([_FORMAT, self._version, self._num_steps], np.int64),
            **self._held(),
            **self._ids.tensors(),
        }
        return {tensor_name(self.name, part): array for part, array in tensors.items()}

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue from what `tensors` has returned. Raises CheckpointError if it does not fit."""
        numbers = stored_tensor(tensors, self.name, "bounded", (3,))
        if numbers[0] != _FORMAT:
            raise CheckpointError(f"table {self.name!r}: expected format {_FORMAT}, got {numbers[0]}: update DOLL")
        ids = stored_tensor(tensors, self.name, "ids", None)
        if ids.dtype != np.int64 or ids.ndim != 1 or len(ids) > self._bounds.max_rows:
            raise CheckpointError(f"table {self.name!r}: expected at most {self._bounds.max_rows} ids, got {ids.shape}")
        own = self._ids.tensors()
        waiting = stored_tensor(tensors, self.name, "waiting", own["waiting"].shape) if "waiting" in own else None
        parts = [stored_tensor(tensors, self.name, part, ids.shape) for part in ("counts", "last_touch")]
        counters = stored_tensor(tensors, self.name, "counters", own["counters"].shape)
        values = stored_tensor(tensors, self.name, "values", (len(ids), self.shape.width))
        self._replace(tensors, values, len(ids))
        self._ids.load(ids, parts[0], parts[1], counters, waiting)
        self._version, self._num_steps = int(numbers[1]), int(numbers[2])

    def _begin(self, slots: npt.NDArray[np.int64]) -> None:
        """The ids of these slots have got their rows now."""
        for array in (self._values, *self._state.values()):
            array.extend(self._ids.num_slots)
        self._values.write(slots, self._bounds.initial.rows(self._ids.ids_of(slots)))
        for array in self._state.values():
            array.write(slots, np.zeros((len(slots), array.width), np.float32))


class CheckpointRows(NamedTuple):
    """The rows of a bounded table in a checkpoint; its other ids have their initial rows.

    Attributes:
        ids: int64, shape (n,), strictly increasing.
        places: of each of them in `all_values`.
        all_values: float32, shape (any number, width); may be in a file.
    """

    ids: Ids
    places: npt.NDArray[np.int64]
    all_values: Floats

    @property
    def values(self) -> Floats:
        """Float32, shape (n, width): a copy."""
        return self.all_values[self.places]

    def write_to(self, ids: Ids, values: Floats) -> None:
        """Replace those of `values`, shape (k, width), the rows `ids`, that are here."""
        if len(self.ids):
            at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
            is_here = self.ids[at] == ids
            values[is_here] = self.all_values[self.places[at[is_here]]]


def stored_bounded_rows(tensors: Mapping[str, npt.NDArray[Any]], name: str, width: int) -> CheckpointRows:
    """The rows of bounded table `name` in a checkpoint. Raises CheckpointError if they are missing, or do not fit."""
    ids: Ids = stored_tensor(tensors, name, "ids", None)
    values: Floats = stored_tensor(tensors, name, "values", (len(ids), width))
    order = np.argsort(ids, kind="stable")
    order = order[np.count_nonzero(ids < 0) :]
    return CheckpointRows(ids[order], order, values)


def renumbered(tensors: Mapping[str, npt.NDArray[Any]], name: str, by: int) -> dict[str, npt.NDArray[Any]]:
    """The tensors of bounded table `name` in a checkpoint that change if its version has a number that is `by` higher:
    its rows are as old as before. Raises CheckpointError if it is missing."""
    numbers, touched = stored_tensor(tensors, name, "bounded", (3,)), stored_tensor(tensors, name, "last_touch", None)
    return {
        tensor_name(name, "bounded"): numbers + np.array([0, by, 0], np.int64),
        tensor_name(name, "last_touch"): np.where(touched == FREE, FREE, touched + by),
    }
