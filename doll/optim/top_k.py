"""Error feedback of sparse rounds: a push sends the largest numbers of each chunk, and the rest is held back. Pure.

Sarfi et al., SparseLoCo (arXiv 2508.15706). Here the residual does not decay: what is held back is settled before a
checkpoint, so that nothing is lost (docs/theory.md).
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from doll.config.policy import SparsePush
from doll.optim.significance_filter import Array, Residual
from doll.tables.rows import CHUNK


class TopK(Residual):
    """The part of one worker's changes that the worker holds back, each with the factor that it has in the model.

    A push is the change of several batches. With 2 bits, a sent number is one of four: the two signs times two
    magnitudes of its chunk, which are the means of the sent numbers above and up to the mean of them all. The error
    stays in the residual.
    """

    def __init__(self, push: SparsePush, num_parameters: int) -> None:
        super().__init__(math.inf, num_parameters)  # no number is sent because of its own size
        self._push = push
        # The pushes that may have to be computed again: the last batch of each, and the residual before it.
        self._pushed: deque[tuple[int, Array]] = deque()

    def send(self, change: Array, batch: int, *, included: int, whole: bool = False) -> None:
        """Add the residual to `change`, the change of several batches of which `batch` is the last. Leave the part to
        send now in `change`, and hold back the rest.

        Args:
            included: batches below this number are in the model, and are not computed again.
            whole: nothing is held back.
        """
        while self._pushed and self._pushed[0][0] < included:
            self._pushed.popleft()
        self._pushed.append((batch, self._held.copy()))
        self._held += change
        if whole:
            change[:] = self._held
        else:
            change[:] = 0.0
            end = len(change) // CHUNK * CHUNK
            for part, width in ((slice(0, end), CHUNK), (slice(end, None), len(change) - end)):
                if width:
                    _largest(self._held[part].reshape(-1, width), change[part].reshape(-1, width), self._push)
        self._held -= change
        self.is_held = bool(self._held.any())

    def take_back(self, batch: int) -> None:
        """Remove the parts of all pushes with batch `batch` or later ones, which are computed again."""
        while self._pushed and self._pushed[-1][0] >= batch:
            self._held[:] = self._pushed.pop()[1]
            self.is_held = bool(self._held.any())

    def below(self, until: int) -> Array | None:
        """Return a copy of the held-back part of the pushes below batch `until`; None: nothing is held back."""
        held = next((before for last, before in self._pushed if last >= until), self._held)
        return held.copy() if held.any() else None

    def clear(self) -> None:
        self._held[:] = 0.0
        self._pushed.clear()
        self.is_held = False


def _largest(held: Array, sent: Array, push: SparsePush) -> None:
    """Write the largest numbers of each row of `held` to `sent`, which has the same shape (chunks, width)."""
    width = held.shape[1]
    count = min(width, math.ceil(push.density * width))
    at = np.argpartition(np.abs(held), width - count, axis=1)[:, width - count :]
    values = np.take_along_axis(held, at, axis=1)
    np.put_along_axis(sent, at, _with_two_magnitudes(values) if push.bits == 2 else values, axis=1)


def _with_two_magnitudes(values: Array) -> Array:
    """Return `values`, shape (chunks, count), with the absolute value of each replaced by one of two in its chunk."""
    sizes = np.abs(values)
    is_high = sizes > _mean(sizes, sizes > 0)
    is_low = (sizes > 0) & ~is_high
    return np.copysign(np.where(is_high, _mean(sizes, is_high), np.where(is_low, _mean(sizes, is_low), 0)), values)


def _mean(sizes: Array, of: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Array:
    count = np.maximum(of.sum(axis=1, keepdims=True), 1).astype(np.float32)
    mean: Array = (sizes * of).sum(axis=1, keepdims=True) / count
    return mean
