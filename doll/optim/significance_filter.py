"""MLLess's significance filter: which part of a step is sent now, and which is held back (Algorithm 1 there). Pure."""

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
    """The newest batch of which a part is held back: its part alone can be told from the others."""

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
    """The part of one worker's steps that it holds back. Shapes: (num_parameters,).

    A number of the residual is sent as soon as it is larger than v / sqrt(t) of the number that it changes, in absolute
    values; each number that is not zero is looked at after every batch, also untouched numbers: the
    bound of Theorem 1 needs it, since the threshold falls with t.
    """

    def __init__(self, threshold: float, num_parameters: int) -> None:
        """`threshold`: v >= 0; 0: nothing is ever held back, and no memory is used."""
        self._threshold = threshold
        self._size = num_parameters if threshold > 0 else 0
        self._held = np.zeros(self._size, np.float32)
        # As it was before the newest batch, which may have to be computed again; that batch's number.
        self._before = np.zeros(self._size, np.float32)
        self._batch = -1
        self.is_held = False  # a number of it is not zero

    @property
    def is_used(self) -> bool:
        """Whether anything can ever be held back."""
        return self._size > 0

    def split(self, step: Array, weights: Array, batch: int, version: int) -> None:
        """Leave in `step` what is sent after batch `batch`, of it and of what was held back; hold the rest.

        Args:
            weights: the worker's view, `step` included.
            version: of the published weights below the view. t is version + 1, the same for all workers of a round,
                as the proof of Theorem 1 has it; a worker that joins late has counted fewer batches.

        Raises:
            IllegalEventError: the batch, or a later one, is in what is held back already.
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
        """The worker's view holds what it has not sent."""
        if self.is_held:
            weights += self._held

    def take_back(self, batch: int) -> None:
        """Batch `batch` and later ones are computed again. Raises IllegalEventError if it is not the newest one, whose
        part alone can be told from the others."""
        self._expect_newest(batch)
        if self._size and 0 <= batch <= self._batch:
            self._held[:] = self._before
            self._batch = -1
            self.is_held = bool(self._held.any())

    def below(self, until: int) -> Array | None:
        """The part of the steps of batches below `until` that is held back, a copy; None: nothing. `clear` it when it
        is stored. Raises IllegalEventError if it cannot be told from what is held back of later ones."""
        self._expect_newest(until)
        held = self._before if 0 <= until <= self._batch else self._held
        return held.copy() if self._size and held.any() else None

    def clear(self) -> None:
        self._held[:] = 0.0
        self._before[:] = 0.0
        self._batch, self.is_held = -1, False


# Rows of a table as the worker sees them, shape (n, width), and which of them it has at all, shape (n,).
See: TypeAlias = Callable[[Ids], tuple[Floats, npt.NDArray[np.bool_]]]


class RowResidual(_NewestBatch):
    """`Residual` of the rows of one table.

    The last 16 bits of a number that is sent are held back as well, if they are not significant either: it then takes
    half the bytes (`doll.storage.sections`).
    """

    def __init__(self, threshold: float, width: int) -> None:
        """`threshold`: v > 0."""
        self._threshold = threshold
        self._before = no_rows(width)
        self._batch = -1
        self.held = no_rows(width)

    def split(self, step: Rows, see: See, batch: int, version: int) -> Rows:
        """The part that is sent after batch `batch`; the rest is held. See `Residual.split`.

        Args:
            see: the worker's view, `step` included. Changes of a row that it does not have any more are sent.

        Raises:
            IllegalEventError: the batch, or a later one, is in what is held back already.
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
        """Batch `batch` and later ones are computed again. Raises IllegalEventError if it is not the newest one, whose
        part alone can be told from the others."""
        self._expect_newest(batch)
        if 0 <= batch <= self._batch:
            self.held, self._batch = self._before, -1

    def below(self, until: int) -> Rows:
        """See `Residual.below`; no rows: nothing."""
        self._expect_newest(until)
        return self._before if 0 <= until <= self._batch else self.held

    def clear(self) -> Ids:
        """Hold nothing. The rows of which something was held, before or after the newest batch."""
        ids = np.union1d(self.held.ids, self._before.ids)
        self.held = self._before = no_rows(self.held.values.shape[1])
        self._batch = -1
        return ids


def _limit(weights: Floats, threshold: float, version: int) -> Floats:
    """The largest change of each weight that is held back. As a product: the ratio to 0 is not defined."""
    return np.float32(threshold / math.sqrt(version + 1)) * np.abs(weights)


def _rounded(values: Floats) -> Floats:
    """The nearest numbers whose last 16 bits are 0 (bfloat16): what they differ by is a float32, exactly."""
    with np.errstate(over="ignore"):
        return ((values.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)


def _without_zeros(rows: Rows) -> Rows:
    is_any = np.abs(rows.values) @ np.ones(rows.values.shape[1], np.float32) > 0  # as any(axis=1), in less time
    return Rows(rows.ids[is_any], rows.values[is_any])
