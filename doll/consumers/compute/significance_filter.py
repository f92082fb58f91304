"""MLLess's significance filter: which part of a step is sent now, and which is held back (Algorithm 1 there). Pure."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from doll.errors import IllegalEventError

Array = npt.NDArray[np.float32]


class Residual:
    """What one worker holds back of its steps. Shapes: (num_parameters,).

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
        if batch <= self._batch:
            raise IllegalEventError(f"expected a batch after {self._batch}, got {batch}: a part of it is held back")
        self._before[:] = self._held
        self._batch = batch
        total = self._held
        total += step
        limit = np.float32(self._threshold / math.sqrt(version + 1))
        # As a product: the ratio to a weight of zero is not defined.
        is_sent = np.abs(total) > limit * np.abs(weights)
        np.multiply(total, is_sent, out=step)
        total[is_sent] = 0.0
        self.is_held = bool(total.any())

    def add_to(self, weights: Array) -> None:
        """The worker's view holds what it has not sent."""
        if self.is_held:
            weights += self._held

    def take_back(self, batch: int) -> None:
        """Batch `batch` and later ones are computed again.

        Raises:
            IllegalEventError: it is not the newest one, whose part alone can be told from the others.
        """
        self._expect_newest(batch)
        if self._size and 0 <= batch <= self._batch:
            self._held[:] = self._before
            self._batch = -1
            self.is_held = bool(self._held.any())

    def of(self, until: int) -> Array | None:
        """What is held back of the steps of batches below `until`, a copy; None: nothing. `clear` it when it is stored.

        Raises:
            IllegalEventError: it cannot be told from what is held back of later ones.
        """
        self._expect_newest(until)
        held = self._before if 0 <= until <= self._batch else self._held
        return held.copy() if self._size and held.any() else None

    def _expect_newest(self, batch: int) -> None:
        if self._size and 0 <= batch < self._batch:
            raise IllegalEventError(
                f"expected batch {self._batch}, the newest of which a part is held back, or a later one; got {batch}"
            )

    def clear(self) -> None:
        """Hold nothing."""
        self._held[:] = 0.0
        self._before[:] = 0.0
        self._batch, self.is_held = -1, False
