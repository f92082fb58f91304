"""Newer weights from those that a worker has read before and the changes since."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from doll.errors import BlobError
from doll.records.control import Grant, NewVersion
from doll.storage.blobs import Blobs, delta_key
from doll.storage.contributions import MAX_SHARE
from doll.storage.deltas import Delta, Layout, decode_changes
from doll.telemetry import get_logger

log = get_logger(__name__)

Weights = npt.NDArray[np.float32]

_MAX_DELTAS: Final = 8  # that are read one after the other: each is a round trip, and so is the whole


class DeltaReader:
    """Keeps a copy of the weights that were read last, without the worker's own steps. Not thread-safe."""

    def __init__(self, job: str, blobs: Blobs, layout: Layout) -> None:
        self._job = job
        self._blobs = blobs
        self._layout = layout
        self._weights = np.zeros(layout.numel, np.float32)
        self._place = (-1, -1)  # term and version of them
        self.num_bytes = 0  # of the last `read`

    def keep(self, weights: Weights, source: Grant | NewVersion) -> None:
        """Keep a copy of these weights, which `source` names; shape (numel,)."""
        self._weights[:] = weights
        self._place = (source.term, source.version)

    def read(self, source: Grant | NewVersion) -> Weights | None:
        """The weights that `source` names, shape (numel,), valid until the next call.

        Returns:
            None if the whole must be read: it is shorter, or what lies between is not in the blob store.
        """
        self.num_bytes = 0
        term, version = self._place
        if term != source.term or version > source.version:
            return None
        deltas: list[Delta] = []
        at, num_values = source.version, 0
        while at > version:
            if len(deltas) == _MAX_DELTAS or (delta := self._delta(term, at)) is None:
                return None
            num_values += len(delta.ids)
            if num_values > MAX_SHARE * self._layout.numel:
                return None
            deltas.append(delta)
            at = delta.since
        for delta in reversed(deltas):
            delta.write_to(self._weights)
        self._place = (term, source.version)
        return self._weights

    def _delta(self, term: int, version: int) -> Delta | None:
        key = delta_key(self._job, term, version)
        if (blob := self._blobs.get(key)) is None:
            return None
        self.num_bytes += len(blob)
        try:
            return decode_changes(blob, self._layout, job=self._job, version=version)
        except BlobError as exc:  # NotFiniteError as well: the whole says what is wrong
            log.warning("delta_refused", key=key, reason=str(exc), action="the whole weights are read")
            return None
