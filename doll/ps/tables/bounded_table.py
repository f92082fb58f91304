"""A table at the parameter server that has rows only for some ids. Rows are made and evicted, and they expire.

The initial row of an id is computed from the id. An id without a stored row has its initial row, and its gradients are
dropped and counted. So an admitted id begins with its initial row, and an evicted id has its initial row again.

Contributions are gradients. Policies whose workers send steps are not supported: a worker would keep its own step on a
row even if the server has dropped the step (docs/decisions/0084).
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
from doll.ps.tables.table_parts import RowAnswer, StoredTable, stored_tensor
from doll.storage.differences import ChangedRows, RowChanges
from doll.storage.sections import RowRequest
from doll.tables.bounds import FirstRows, TableBounds
from doll.tables.checkpointed import tensor_name
from doll.tables.rows import Floats, Ids, Rows, TableShape, found

_FORMAT: Final = 1


class BoundedTable(StoredTable):
    """A table of at most `bounds.max_rows` rows."""

    def __init__(
        self, name: str, shape: TableShape, bounds: TableBounds, optimizer: RowOptimizer, first: FirstRows | None = None
    ) -> None:
        """
        Args:
            shape: shape of the table; its `num_rows` is the number of possible ids.
            first: rows at the start; None: no id has a row.
        """
        super().__init__(name, np.zeros((0, shape.width), np.float32), optimizer)
        self.shape = shape
        self._bounds = bounds
        self._ids = BoundedIds(bounds)
        self._changed: list[Ids] | None = None  # None: changes are not recorded
        if first is not None:
            slots = self._ids.begin_with(first.ids, first.counts)
            self._begin(slots)
            self._values.write(slots, first.values)

    @property
    def totals(self) -> Totals:
        return self._ids.totals

    def read(self, ids: Ids) -> Rows:
        """Return a copy of the current rows of these ids (GET)."""
        slots = self._ids.find(ids)
        is_here = slots >= 0
        values = np.empty((len(ids), self.shape.width), np.float32)
        values[is_here] = self._values.read(slots[is_here])
        values[~is_here] = self._bounds.initial.rows(ids[~is_here])
        return Rows(ids, values)

    def answer(self, request: RowRequest, author: int = NOBODY) -> RowAnswer:
        """Return the rows of `request.ids`, and the rows of `request.known` that may have changed after
        `request.since`, by any author. Known ids without a row are included, because they may have lost it since."""
        known = request.known
        slots = self._ids.find(known)
        last_touch = np.where(slots >= 0, self._ids.last_touch(slots), self._version + 1)
        is_of_term = np.less_equal(request.since, self._version)  # a later version is of an earlier term, and void
        changed = known[(last_touch > request.since) | ~is_of_term]
        return RowAnswer(self.read(np.union1d(request.ids, changed) if len(changed) else request.ids))

    def follow(self, is_followed: bool = True) -> None:
        """Start (True) or stop (False) the recording of changes for `changes`."""
        self._changed = self._ids.lost = [] if is_followed else None

    def changes(self) -> Rows:
        """Return the rows that have changed since the last call or `follow`; initial rows for ids that lost theirs."""
        changed = self._changed or []
        self.follow()
        return self.read(np.unique(np.concatenate(changed)) if changed else np.empty(0, np.int64))

    def apply(
        self, scale: float, version: int, authors: Mapping[int, int] | None = None, lr_factor: float = 1.0
    ) -> None:
        """Make the rows of `version`: expire rows, admit ids, and apply `lr_factor` times one optimizer step with the
        sum of the gradients times `scale`. Raises DivergedError if a number is not finite."""
        self._version = version
        self._ids.expire(version)
        if not self._pending:
            return
        # The parts are sorted, so a stable sort merges them.
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
        self._step(slots, slots, total, scale, lr_factor)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return all arrays by name, for a checkpoint. Later updates do not change them."""
        tensors: dict[str, npt.NDArray[Any]] = {
            "bounded": np.array([_FORMAT, self._version, self._num_steps], np.int64),
            **self._held(),
            **self._ids.tensors(),
        }
        return {tensor_name(self.name, part): array for part, array in tensors.items()}

    def row_changes(self) -> RowChanges:
        """Return the changes of the arrays of `tensors`, as they are now."""
        sizes = {part: array.width for part, array in self._parts()}
        of_ids = self._ids.row_changes()

        def since(version: int) -> dict[str, ChangedRows]:
            changed = of_ids(version)
            changed |= {part: ChangedRows(changed["ids"].rows, size) for part, size in sizes.items()}
            return {tensor_name(self.name, part): rows for part, rows in changed.items()}

        return since

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue from a result of `tensors`. Raises CheckpointError if it does not fit."""
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
        """Set the rows of newly admitted ids, which are in these slots."""
        for array in (self._values, *self._state.values()):
            array.extend(self._ids.num_slots)
        self._values.write(slots, self._bounds.initial.rows(self._ids.ids_of(slots)))
        for array in self._state.values():
            array.write(slots, np.zeros((len(slots), array.width), np.float32))


class CheckpointRows(NamedTuple):
    """The rows of a bounded table in a checkpoint. All other ids have their initial rows.

    Attributes:
        ids: int64, shape (n,), strictly increasing.
        places: index of each id's row in `all_values`.
        all_values: float32, shape (any number, width); may be mapped from a file.
    """

    ids: Ids
    places: npt.NDArray[np.int64]
    all_values: Floats

    @property
    def values(self) -> Floats:
        """The rows of `ids`, float32, shape (n, width): a copy."""
        return self.all_values[self.places]

    def write_to(self, ids: Ids, values: Floats) -> None:
        """Overwrite the rows in `values`, shape (k, width), of those `ids` that have a row here."""
        is_here, at = found(ids, self.ids)
        values[is_here] = self.all_values[self.places[at]]


def stored_bounded_rows(tensors: Mapping[str, npt.NDArray[Any]], name: str, width: int) -> CheckpointRows:
    """Return the rows of bounded table `name` in a checkpoint. Raises CheckpointError if they are missing or wrong."""
    ids: Ids = stored_tensor(tensors, name, "ids", None)
    values: Floats = stored_tensor(tensors, name, "values", (len(ids), width))
    order = np.argsort(ids, kind="stable")
    order = order[np.count_nonzero(ids < 0) :]
    return CheckpointRows(ids[order], order, values)


def renumbered(tensors: Mapping[str, npt.NDArray[Any]], name: str, by: int) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of bounded table `name` that must change if the version of its checkpoint is increased by
    `by`. With these tensors, the age of the rows stays the same. Raises CheckpointError if the table is missing."""
    numbers, touched = stored_tensor(tensors, name, "bounded", (3,)), stored_tensor(tensors, name, "last_touch", None)
    return {
        tensor_name(name, "bounded"): numbers + np.array([0, by, 0], np.int64),
        tensor_name(name, "last_touch"): np.where(touched == FREE, FREE, touched + by),
    }
