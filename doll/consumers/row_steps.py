"""A worker's optimizer for the rows of one table, for policies whose workers send steps: gradients in, changes out.

State exists for the rows that this worker has had a gradient of. It is this process's own: it begins again with each
process and never crosses the wire, as that of `doll.consumers.step_model`.
"""

from __future__ import annotations

import numpy as np
import torch

from doll.id_index import IdIndex
from doll.optim.row_optimizer import RowOptimizer
from doll.rows import Floats, Rows

_FIRST_PLACES = 1024


class RowSteps:
    """Steps on one table. Not thread-safe."""

    def __init__(self, width: int, optimizer: RowOptimizer) -> None:
        self._optimizer = optimizer
        self._index = IdIndex(_FIRST_PLACES)
        self._state = {name: np.zeros((_FIRST_PLACES, width), np.float32) for name in optimizer.state_names}
        self._num_rows = self._num_steps = 0

    def __len__(self) -> int:
        """Rows that have state."""
        return self._num_rows

    def step(self, rows: Floats, gradient: Rows, scale: float) -> Rows:
        """What one step changes in these rows: what INC adds (`RowCache.inc`).

        Args:
            rows: of `gradient.ids`, as the worker sees them, float32, shape (n, width).
            gradient: of one batch.
            scale: factor for the gradient: 1 / samples for their mean.
        """
        slots = self._index.find(gradient.ids)
        is_new = slots < 0
        if (count := int(np.count_nonzero(is_new))) > 0:
            self._make_room(self._num_rows + count)
            slots[is_new] = np.arange(self._num_rows, self._num_rows + count)
            self._index.insert(gradient.ids[is_new], slots[is_new])
            self._num_rows += count
        state = {name: array[slots] for name, array in self._state.items()}
        self._num_steps += 1
        after = self._optimizer.step(
            torch.from_numpy(rows.copy()),
            torch.from_numpy(gradient.values * np.float32(scale)),
            {name: torch.from_numpy(array) for name, array in state.items()},
            self._num_steps,
        )
        for name, array in state.items():
            self._state[name][slots] = array
        return Rows(gradient.ids, after.numpy() - rows)

    def _make_room(self, num_rows: int) -> None:
        places = len(self._index.ids)
        if num_rows > places:
            index, slots = IdIndex(max(num_rows, 2 * places)), np.arange(self._num_rows)
            index.insert(self._index.ids[: self._num_rows], slots)
            self._index = index
            for name, array in self._state.items():
                grown = np.zeros((len(index.ids), array.shape[1]), np.float32)
                grown[: self._num_rows] = array[: self._num_rows]
                self._state[name] = grown
