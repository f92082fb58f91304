"""A worker's own steps on one table that the rows it fetches may lack: INC, CLOCK and read-my-writes. Pure.

Steps of one batch are one entry, with one row for each id (coalesced). An entry stays until the server's rows contain
it: the server says of each version how many of the worker's batches it includes.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from doll.errors import IllegalEventError
from doll.tables.rows import Floats, Ids, Rows, add_in_order, add_where_equal, no_rows


class OpLog:
    """Own steps, by batch, oldest first, and those of the batch that is open. Not thread-safe."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._open = no_rows(width)
        self._closed: deque[tuple[int, Rows]] = deque()  # (batch, its steps)

    def __len__(self) -> int:
        """Batches whose steps are kept, without the open one."""
        return len(self._closed)

    @property
    def num_rows(self) -> int:
        """Rows of all entries."""
        return len(self._open.ids) + sum(len(rows.ids) for _, rows in self._closed)

    def inc(self, steps: Rows) -> None:
        """Add to the open batch's steps."""
        self._open = add_in_order([self._open, steps]) if len(self._open.ids) else steps

    def close(self, batch: int) -> Rows:
        """End the open batch (CLOCK); its steps, to be pushed.

        Args:
            batch: its number, higher than those before it.

        Raises:
            IllegalEventError: it is not.
        """
        if self._closed and batch <= self._closed[-1][0]:
            raise IllegalEventError(f"expected a batch after {self._closed[-1][0]}, got {batch}")
        rows, self._open = self._open, no_rows(self._width)
        self._closed.append((batch, rows))
        return rows

    def forget(self, included: int) -> None:
        """The rows that are fetched from now on contain the steps of all batches below `included`."""
        while self._closed and self._closed[0][0] < included:
            self._closed.popleft()

    def take_back(self, batch: int) -> Ids:
        """Drop the steps of `batch`, of those after it and of the open one: they will be computed again. The rows that
        they have changed."""
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
