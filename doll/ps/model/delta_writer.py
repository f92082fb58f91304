"""Publishes what each version has changed, beside its weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from doll.storage.blobs import Blobs, delta_key
from doll.storage.deltas import Layout, changes


class DeltaWriter:
    """Of one term. It keeps a copy of the weights that it was given last."""

    def __init__(self, scope: str, term: int, blobs: Blobs, ttl_s: float, num_parameters: int) -> None:
        self._scope = scope
        self._term = term
        self._blobs = blobs
        self._ttl_s = ttl_s
        self._num_parameters = num_parameters
        self._before: npt.NDArray[np.float32] | None = None
        self._version = -1  # of `_before`

    def put(self, weights: npt.NDArray[np.float32], version: int) -> None:
        """Store what has changed since the version that this was called with before, if it is shorter than the whole.

        Args:
            weights: float32, shape (numel,).
        """
        if version <= self._version:  # published again
            return
        before, since = self._before, self._version
        if before is None:
            self._before, self._version = weights.copy(), version
            return
        layout = Layout(weights.size, self._num_parameters)
        delta = changes(before, weights, layout, job=self._scope, since=since, version=version)
        if delta is not None:
            self._blobs.put(delta_key(self._scope, self._term, version), delta, self._ttl_s)
        before[:] = weights
        self._version = version
