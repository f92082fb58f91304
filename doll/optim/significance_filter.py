"""The significance filter of MLLess, which splits a step into a part to send and a part to hold back (Alg. 1). Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from doll.errors import IllegalEventError
from doll.tables.rows import Floats, Ids, Rows, add_in_order, no_rows

Array = npt.NDArray[np.float32]


class _NewestBatch:
    """The newest batch with a held-back part. Only the newest batch's part can be separated from the other parts."""

    _batch = -1

    def _expect_later(self, batch: int) -> None:
        if batch <= self._batch:
            raise IllegalEventError(f"expected a batch after {self._batch}, got {batch}: a part of it is held back")

    def _expect_newest(self, batch: int) -> None:
        if 0 <= batch < self._batch:
            raise IllegalEventError(
                f"expected batch {self._batch}, the newest of which a part is held back, or a later one; got {batch}"
            )


class Residual(_NewestBatch):
    """The part of one worker's steps that the worker holds back. Arrays have the shape (num_parameters,).

    A number of the residual is sent as soon as its absolute value is larger than v / sqrt(t) times the absolute value
    of the weight that it changes. After every batch, all nonzero numbers are checked, even those of weights that the
    batch has not changed. The bound of Theorem 1 requires this, since the threshold falls with t.
    """

    def __init__(self, threshold: float, num_parameters: int) -> None:
        """`threshold`: v >= 0; 0: nothing is ever held back, and no memory is used."""
        self._threshold = threshold
        self._size = num_parameters if threshold > 0 else 0
        self._held = np.zeros(self._size, np.float32)
        # The residual before the newest batch, which may have to be computed again, and the number of this batch.
        self._before = np.zeros(self._size, np.float32)
        self._batch = -1
        self.is_held = False  # whether a number of the residual is not zero

    @property
    def is_used(self) -> bool:
        """Whether anything can ever be held back."""
        return self._size > 0

    def split(self, step: Array, weights: Array, batch: int, version: int) -> None:
        """Add the residual to `step`, the step of `batch`. Leave the part to send now in `step`, and hold back the
        rest.

        Args:
            weights: the weights of the worker, `step` included.
            version: version of the published weights from which the worker's weights were made. t is version + 1, which
                is the same for all workers of a round, as in the proof of Theorem 1. The worker's own number of batches
                is lower if it has joined late.

        Raises:
            IllegalEventError: the residual already has a part of this batch, or of a later one.
        """
        self._expect_later(batch)
        self._before[:] = self._held
        self._batch = batch
        total = self._held
        total += step
        is_sent = np.abs(total) > _limit(weights, self._threshold, version)
        np.multiply(total, is_sent, out=step)
        total[is_sent] = 0.0
        self.is_held = bool(total.any())

    def add_to(self, weights: Array) -> None:
        """Add the residual to `weights`, so that the worker's weights contain the steps that it has not sent."""
        if self.is_held:
            weights += self._held

    def take_back(self, batch: int) -> None:
        """Remove the parts of batch `batch` and of later ones, which are computed again. Raises IllegalEventError if
        `batch` is not the newest batch: only the newest batch's part can be separated."""
        self._expect_newest(batch)
        if self._size and 0 <= batch <= self._batch:
            self._held[:] = self._before
            self._batch = -1
            self.is_held = bool(self._held.any())

    def below(self, until: int) -> Array | None:
        """Return a copy of the held-back part of the batches below `until`; None: nothing is held back. Call `clear`
        after it is stored. Raises IllegalEventError if it cannot be separated from the parts of later batches."""
        self._expect_newest(until)
        held = self._before if 0 <= until <= self._batch else self._held
        return held.copy() if self._size and held.any() else None

    def clear(self) -> None:
        self._held[:] = 0.0
        self._before[:] = 0.0
        self._batch, self.is_held = -1, False


# Function from ids to the rows as the worker sees them, shape (n, width), and whether it has each row, shape (n,).
See: TypeAlias = Callable[[Ids], tuple[Floats, npt.NDArray[np.bool_]]]


class RowResidual(_NewestBatch):
    """A `Residual` of the rows of one table.

    If the last 16 bits of a sent number are not significant, they are held back as well. Then the number takes half the
    bytes (`doll.storage.sections`).
    """

    def __init__(self, threshold: float, width: int) -> None:
        """`threshold`: v > 0."""
        self._threshold = threshold
        self._before = no_rows(width)
        self._batch = -1
        self.held = no_rows(width)

    def split(self, step: Rows, see: See, batch: int, version: int) -> Rows:
        """Return the part that is sent after batch `batch`, and hold back the rest. See `Residual.split`.

        Args:
            see: function that returns the worker's rows, `step` included. Changes of rows that the worker does not have
                any more are sent.

        Raises:
            IllegalEventError: the residual already has a part of this batch, or of a later one.
        """
        self._expect_later(batch)
        self._before, self._batch = self.held, batch
        ids, total = add_in_order([self.held, step])
        rows, is_here = see(ids)
        limit = _limit(rows, self._threshold, version)
        sent = _rounded(total)
        np.copyto(sent, total, where=~(np.abs(total - sent) <= limit))
        sent[np.abs(total) <= limit] = 0.0
        sent[~is_here] = total[~is_here]
        self.held = _without_zeros(Rows(ids, total - sent))
        return _without_zeros(Rows(ids, sent))

    def take_back(self, batch: int) -> None:
        """Remove the parts of batch `batch` and of later ones, which are computed again. Raises IllegalEventError if
        `batch` is not the newest batch: only the newest batch's part can be separated."""
        self._expect_newest(batch)
        if 0 <= batch <= self._batch:
            self.held, self._batch = self._before, -1

    def below(self, until: int) -> Rows:
        """Return the held-back part of the batches below `until`; no rows if there is none. See `Residual.below`."""
        self._expect_newest(until)
        return self._before if 0 <= until <= self._batch else self.held

    def clear(self) -> Ids:
        """Clear the residual. Return the ids of rows with a held-back part, before or after the newest batch."""
        ids = np.union1d(self.held.ids, self._before.ids)
        self.held = self._before = no_rows(self.held.values.shape[1])
        self._batch = -1
        return ids


def _limit(weights: Floats, threshold: float, version: int) -> Floats:
    """Return the largest change of each weight that is held back. It is a product, since a ratio to 0 is undefined."""
    return np.float32(threshold / math.sqrt(version + 1)) * np.abs(weights)


def _rounded(values: Floats) -> Floats:
    """Return the nearest numbers whose last 16 bits are 0 (bfloat16). The differences are exact float32 numbers."""
    with np.errstate(over="ignore"):
        return ((values.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)


def _without_zeros(rows: Rows) -> Rows:
    is_any = np.abs(rows.values) @ np.ones(rows.values.shape[1], np.float32) > 0  # like any(axis=1), but faster
    return Rows(rows.ids[is_any], rows.values[is_any])
