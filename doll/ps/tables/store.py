"""The tables of a model at the parameter server, or the rows of them that a shard has (`doll.tables.row_slices`).

Workers read rows (GET), and updates apply what workers have pushed.

Contributions are either gradients, with which the optimizer makes a step, or steps of workers, which are added (INC).
Contributions are summed in the order of the calls of `add`, which is the order of the update. So a replay makes the
same tables, bit for bit. Rows that no contribution names are not changed and have no optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from doll.errors import CheckpointError
from doll.optim.row_optimizer import RowOptimizer
from doll.ps.tables.bounded_ids import Totals
from doll.ps.tables.bounded_table import BoundedTable
from doll.ps.tables.number_changes import NOBODY, Authors, NumberChanges
from doll.ps.tables.table_parts import RowAnswer, StoredTable, stored_tensor
from doll.ps.tables.touched_rows import TouchedRows
from doll.storage.differences import ChangedRows, RowChanges
from doll.storage.sections import RowRequest, is_patch_shorter
from doll.tables.checkpointed import NUMBERS, TOUCHED, VALUES, tensor_name
from doll.tables.rows import Floats, Ids, Patch, Rows, TableShape, checksum_of

_NO_AUTHORS: Final[Mapping[int, int]] = {}
_NO_TABLES: Final[Mapping[str, BoundedTable]] = {}


class Table(StoredTable):
    """A table with a row for each id."""

    def __init__(
        self, name: str, values: Floats, optimizer: RowOptimizer | None, *, counts_empty: bool = False
    ) -> None:  # fmt: skip
        super().__init__(name, values, optimizer, counts_empty=counts_empty)
        self._touched = TouchedRows(len(values))
        self._said = 0  # version up to which `changes` has returned the changes
        self._numbers: NumberChanges | None = None

    def track_numbers(self) -> None:
        """Track single numbers, so that answers contain the changed numbers of known rows, not whole rows."""
        self._numbers = NumberChanges(self.shape.width, self._version)

    @property
    def shape(self) -> TableShape:
        return TableShape(len(self._values), self._values.width)

    def read(self, ids: Ids) -> Rows:
        """Return a copy of the current rows of these ids (GET)."""
        return Rows(ids, self._values.read(ids))

    def answer(self, request: RowRequest, author: int = NOBODY) -> RowAnswer:
        """Return the rows of `request.ids`, and the changes in the rows of `request.known` after `request.since`. The
        changes are whole rows or, if numbers are tracked, the numbers that authors other than `author`, the requesting
        process, have changed."""
        if self._numbers is not None and len(request.known):
            return self._patched(request, self._numbers, author)
        changed = request.known
        is_of_term = np.less_equal(request.since, self._version)  # a later version is of an earlier term, and void
        changed = changed[(self._touched.last_change(changed) > request.since) | ~is_of_term]
        return RowAnswer(self.read(np.union1d(request.ids, changed) if len(changed) else request.ids))

    def _patched(self, request: RowRequest, numbers: NumberChanges, author: int) -> RowAnswer:
        known = request.known
        since = np.broadcast_to(request.since, len(known))
        rows = self._values.read(known)
        checksum = checksum_of(rows)  # if `since` belongs to an earlier term, the checksum will not match
        at = np.flatnonzero(self._touched.last_change(known) > since)
        is_there = numbers.since(self._touched.slots(known[at]), since[at], author)
        is_any = is_there.any(axis=1)
        at, is_there = at[is_any], is_there[is_any]
        if is_patch_shorter(is_there):
            return RowAnswer(
                self.read(request.ids),
                Patch(known[at], is_there, rows[at].reshape(-1)[np.flatnonzero(is_there)], checksum),
            )
        whole = np.sort(np.concatenate([request.ids, known[at]]))
        whole = whole[np.diff(whole, prepend=-1) > 0]
        return RowAnswer(self.read(whole), Patch(known[:0], is_there[:0], rows[:0].reshape(-1), checksum))

    def follow(self, is_followed: bool = True) -> None:
        """Start the recording of changes for `changes`."""
        self._said = self._version

    def changes(self) -> Rows:
        """Return the rows that have changed since the last call, or since `follow`."""
        said, self._said = self._said, self._version
        return self.read(self._touched.changed_since(said))

    def changed_since(self, version: int) -> Ids:
        """Return the rows that have changed after `version`, sorted."""
        return self._touched.changed_since(version)

    def apply(
        self, scale: float, version: int, authors: Mapping[int, int] = _NO_AUTHORS, lr_factor: float = 1.0
    ) -> None:
        """Make the rows of `version`: one step with `scale` times the sum of the contributions, if there are any.

        Args:
            authors: by number of a set, the process that can compute the set's change by itself; `NOBODY` if there is
                none.
            lr_factor: factor of the step of an optimizer.

        Raises:
            DivergedError: a number is not finite.
        """
        if not self._pending:
            return
        self._version = version
        if self._optimizer is None:
            pending, self._pending = self._pending, []
            for rows, number in pending:
                slots = self._touched.note_change(rows.ids, version)
                before = self._values.read(rows.ids)
                after = before + np.float32(scale) * rows.values
                self._note(slots, before, after, authors.get(number, NOBODY))
                self._write(rows.ids, after)
            return
        ids, total = self._take_sum()
        slots = self._touched.note_change(ids, version)
        for array in self._state.values():
            array.extend(len(self._touched))
        rows_before = None if self._numbers is None else self._values.read(ids)
        self._step(ids, slots, total, scale, lr_factor)
        if rows_before is not None:
            self._note(slots, rows_before, self._values.read(ids), NOBODY)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return all arrays by name, for a checkpoint, with the ids and the optimizer state of touched rows only.

        Later updates do not change the arrays, which are not copies (`RowArray.hold`).
        """
        numbers = np.array([self._version, self._num_steps], np.int64)
        tensors = {**self._held(), TOUCHED: self._touched.ids, NUMBERS: numbers}
        return {tensor_name(self.name, name): array for name, array in tensors.items()}

    def row_changes(self) -> RowChanges:
        """Return the changes of the arrays of `tensors`, as they are now."""
        ids, slots_since = self._touched.ids, self._touched.history()
        sizes = {part: array.width for part, array in self._parts()} | {TOUCHED: 1}

        def since(version: int) -> dict[str, ChangedRows]:
            slots = slots_since(version)
            rows = ids[slots]
            return {
                tensor_name(self.name, part): ChangedRows(rows if part == VALUES else slots, size)
                for part, size in sizes.items()
            }

        return since

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue from a result of `tensors`. Every touched row counts as changed in its version. Raises
        CheckpointError if it does not fit."""
        touched = stored_tensor(tensors, self.name, TOUCHED, None)
        if len(touched) and not (
            touched.dtype == np.int64 and touched.min() >= 0 and touched.max() < self.shape.num_rows
        ):
            raise CheckpointError(f"table {self.name!r}: expected touched rows of 0 to {self.shape.num_rows - 1}")
        self._version, self._num_steps = map(int, stored_tensor(tensors, self.name, NUMBERS, (2,)))
        self._replace(tensors, stored_rows(tensors, self.name, self.shape), len(touched))
        self._touched.load(touched, self._version)
        if self._numbers is not None:
            self.track_numbers()

    def _note(self, slots: npt.NDArray[np.int64], before: Floats, after: Floats, author: int) -> None:
        """Note that rows change from `before` to `after`. The comparison is bitwise: -0.0 and 0.0 are different."""
        if self._numbers is not None:
            self._numbers.note(slots, before.view(np.uint32) != after.view(np.uint32), self._version, author)


def stored_rows(tensors: Mapping[str, npt.NDArray[Any]], name: str, shape: TableShape) -> Floats:
    """Return all rows of table `name` in a checkpoint, float32, shape (num_rows, width). Raises CheckpointError if they
    are missing, or of another shape."""
    return stored_tensor(tensors, name, "values", shape)


class TableStore:
    """All tables of a model. An update changes them together. Not thread-safe.

    Attributes:
        tables: tables with a row for each id, by name.
        bounded: bounded tables, by name.
    """

    def __init__(
        self, initial: Mapping[str, Floats], optimizers: Mapping[str, RowOptimizer] | None,
        bounded: Mapping[str, BoundedTable] = _NO_TABLES, *, is_slice: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            initial: first rows of each table, by name, float32, shape (num_rows, width). The store owns this memory
                from now on.
            optimizers: optimizer of each table, by name. None: contributions are steps, which are added.
            is_slice: whether these are the rows of a shard.
        """
        self._takes_gradients = optimizers is not None
        self.tables = {
            name: Table(name, values, None if optimizers is None else optimizers[name], counts_empty=is_slice)
            for name, values in initial.items()
        }
        self.bounded = dict(bounded)
        self._by_name: dict[str, Table | BoundedTable] = {**self.tables, **self.bounded}
        self.authors: Authors | None = None  # None: numbers are not tracked

    def track_numbers(self) -> None:
        self.authors = Authors()
        for table in self.tables.values():
            table.track_numbers()

    @property
    def shapes(self) -> dict[str, TableShape]:
        return {name: table.shape for name, table in self._by_name.items()}

    @property
    def totals(self) -> dict[str, Totals]:
        return {name: table.totals for name, table in self.bounded.items()}

    def read(self, name: str, ids: Ids) -> Rows:
        """Return a copy of the current rows of these ids of table `name` (GET)."""
        return self._by_name[name].read(ids)

    def add(self, contribution: Mapping[str, Rows], number: int = 0) -> None:
        """Add the contribution of one set, with this number, to the next update, after earlier contributions."""
        for name, rows in contribution.items():
            self._by_name[name].add(rows, number)

    def max_change(self, contribution: Mapping[str, Rows]) -> float:
        """Return the largest change of a single number by `contribution`; 0 if the contribution is a gradient."""
        if self._takes_gradients:
            return 0.0
        return max((float(np.abs(rows.values).max(initial=0.0)) for rows in contribution.values()), default=0.0)

    def norm(self) -> float:
        """Return the Euclidean norm of the sum of all contributions, over all tables."""
        return math.sqrt(sum(table.square_norm() for table in self._by_name.values()))

    def apply(
        self, scale: float, version: int, authors: Mapping[int, int] = _NO_AUTHORS, lr_factor: float = 1.0
    ) -> None:
        """Make `version`; see `Table.apply` and `BoundedTable.apply`. Raises DivergedError if a number is not finite;
        then the store must not be used any more."""
        for table in self._by_name.values():
            table.apply(scale, version, authors, lr_factor)

    def answer(self, requests: Mapping[str, RowRequest], worker: int = 0, session: int = 0) -> dict[str, RowAnswer]:
        """Return the answer to a request of this worker process, from the current rows; see `Table.answer`."""
        author = NOBODY if self.authors is None else self.authors.number(worker, session)
        return {name: self._by_name[name].answer(request, author) for name, request in requests.items()}

    def follow(self, is_followed: bool = True) -> None:
        """Start (True) or stop (False) the recording of changes for `changes`."""
        for table in self._by_name.values():
            table.follow(is_followed)

    def changes(self) -> dict[str, Rows]:
        """Return, for each table, the current rows that have changed since the last call, or since `follow`."""
        return {name: table.changes() for name, table in self._by_name.items()}

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return the tensors of all tables, for a checkpoint; see `Table.tensors`."""
        return {name: array for table in self._by_name.values() for name, array in table.tensors().items()}

    def row_changes(self) -> RowChanges:
        """Return which rows of the arrays of `tensors` change, for a differential checkpoint. Later updates do not
        change the result."""
        changes = [table.row_changes() for table in self._by_name.values()]
        return lambda since: {name: rows for of_table in changes for name, rows in of_table(since).items()}

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue from a result of `tensors`. Raises CheckpointError if it does not fit."""
        for table in self._by_name.values():
            table.load(tensors)
