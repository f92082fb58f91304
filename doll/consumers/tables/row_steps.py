"""A worker's optimizer for the rows of one table, for policies whose workers send steps. It converts gradients to
changes of rows.

Only rows that had a gradient in this worker have optimizer state. The state belongs to this process: each process
starts with a new state, which is never sent, as in `doll.consumers.compute.step_model`. Its memory may be limited. If
this memory is full, the rows whose last gradient is oldest lose their state. Such rows are then treated like rows
without earlier gradients.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from doll.errors import TaskError
from doll.optim.row_optimizer import RowOptimizer, state_width
from doll.tables.id_index import IdIndex
from doll.tables.rows import Floats, Ids, Rows, grown

_FIRST_PLACES: Final = 1024
_PLACE_BYTES: Final = 9 + 16 + 8 + 8  # place in the index and its cells, last use, list of free slots
_EVICTED_AT_ONCE: Final = 8  # one row in so many: finding them costs as much as looking at all rows
_NEVER: Final = -1


def state_row_bytes(optimizer: RowOptimizer, width: int) -> int:
    """Return the memory in bytes for the state of one row of `width` values."""
    num_states = len(optimizer.state_names)
    return 4 * state_width(optimizer, width) * num_states + _PLACE_BYTES if num_states else 0


class RowSteps:
    """The optimizer steps on one table. Not thread-safe."""

    def __init__(self, width: int, optimizer: RowOptimizer, max_bytes: int | None = None) -> None:
        """Create an empty state. `max_bytes` limits the memory of the state, which always has room for one row; None:
        no limit."""
        self.num_evicted = 0  # how many times a row has lost its state
        self._optimizer = optimizer
        self._row_bytes = state_row_bytes(optimizer, width)
        is_bounded = max_bytes is not None and self._row_bytes > 0
        self._capacity = max(1, (max_bytes or 0) // self._row_bytes) if is_bounded else None
        self._index = IdIndex(1)
        self._state = {name: np.zeros((0, state_width(optimizer, width)), np.float32) for name in optimizer.state_names}
        self._last_use = np.empty(0, np.int64)  # number of the step, by slot; `_NEVER`: the slot is free
        self._free: Ids = np.empty(0, np.int64)
        self._num_steps = 0

    def __len__(self) -> int:
        """Return the number of rows that have state."""
        return len(self._last_use) - len(self._free)

    @property
    def num_bytes(self) -> int:
        """The allocated memory for state, in bytes, including free slots."""
        return len(self._last_use) * self._row_bytes

    def step(self, rows: Floats, gradient: Rows, scale: float) -> Rows:
        """Return the changes of these rows by one step. The caller adds them with INC (`OpLog.inc`).

        Args:
            rows: the rows `gradient.ids` as the worker sees them, float32, shape (n, width).
            scale: factor for the gradient; for the mean gradient, 1 / number of samples.

        Raises:
            TaskError: there is no room for so many optimizer states.
        """
        self._num_steps += 1
        slots = self._slots(gradient.ids) if self._state else None
        state = {name: array[slots] for name, array in self._state.items()}
        after = self._optimizer.step(
            torch.from_numpy(rows.copy()),
            torch.from_numpy(gradient.values * np.float32(scale)),
            {name: torch.from_numpy(array) for name, array in state.items()},
            self._num_steps,
        )
        for name, array in state.items():
            self._state[name][slots] = array
        return Rows(gradient.ids, after.numpy() - rows)

    def _slots(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the slots of the state of `ids`, and mark them as used now. New slots contain zeros."""
        if self._capacity is not None and len(ids) > self._capacity:
            raise TaskError(
                f"a batch has gradients of {len(ids):,} rows of one table, and worker.row_cache_bytes leaves room for "
                f"the optimizer's state of {self._capacity:,}: set it to {len(ids) / self._capacity:.1f} times as much "
                "at least, take smaller batches, or the optimizer sgd, which has no state"
            )
        slots = self._index.find(ids)
        self._last_use[slots[slots >= 0]] = self._num_steps
        is_new = slots < 0
        if count := int(np.count_nonzero(is_new)):
            self._make_room(count)
            slots[is_new], self._free = self._free[:count], self._free[count:]
            self._index.insert(ids[is_new], slots[is_new])
            self._last_use[slots[is_new]] = self._num_steps
        return slots

    def _make_room(self, count: int) -> None:
        """Make at least `count` slots free."""
        lacking = count - len(self._free)
        places = len(self._last_use)
        if lacking > 0 and (self._capacity is None or places < self._capacity):
            wanted = max(places + lacking, 2 * places, _FIRST_PLACES)
            self._grow(wanted if self._capacity is None else min(wanted, self._capacity))
            lacking = count - len(self._free)
        if lacking > 0:
            self._evict(max(lacking, places // _EVICTED_AT_ONCE))

    def _grow(self, places: int) -> None:
        before = len(self._last_use)
        used = np.flatnonzero(self._last_use != _NEVER)
        index = IdIndex(places)
        index.insert(self._index.ids[used], used)
        self._index = index
        self._last_use = np.concatenate([self._last_use, np.full(places - before, _NEVER, np.int64)])
        self._free = np.concatenate([self._free, np.arange(before, places)])
        self._state = {name: grown(array, places) for name, array in self._state.items()}

    def _evict(self, count: int) -> None:
        """Drop the state of `count` rows, or of all rows that this step does not use."""
        slots = np.flatnonzero((self._last_use != _NEVER) & (self._last_use < self._num_steps))
        if len(slots) > count:
            slots = slots[np.argpartition(self._last_use[slots], count - 1)[:count]]
        self._index.remove(slots)
        self._last_use[slots] = _NEVER
        for array in self._state.values():
            array[slots] = 0.0
        self._free = np.concatenate([self._free, slots])
        self.num_evicted += len(slots)
