"""Faster ways to newer weights: reading during the computation, or computing them from older weights and deltas."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from doll.errors import BlobError
from doll.model.slices import Slices
from doll.records.control import Grant, NewVersion
from doll.storage.blobs import Blobs, delta_key
from doll.storage.contributions import MAX_SHARE
from doll.storage.deltas import Delta, Layout, decode_changes
from doll.storage.slice_blobs import SliceBlobs
from doll.telemetry import get_logger

log = get_logger(__name__)

Weights: TypeAlias = npt.NDArray[np.float32]
Read: TypeAlias = Callable[[Grant | NewVersion], Weights | None]


class _WeightsReading(NamedTuple):
    place: tuple[int, int]  # term, version
    weights: Future[Weights | None]


class WeightsAhead:
    """A reader that reads the newest offered weights while the worker computes, one version at a time: the eager
    communication of ESSP (Dai et al., AAAI 2015). Thread-safe.

    The reader keeps at most one version: the next read drops the previous result. A new offer replaces an earlier offer
    if the read of the earlier offer has not begun.
    """

    def __init__(self, read: Read, executor: Executor) -> None:
        """Create the reader.

        Args:
            read: function that returns the checked weights under a key, float32, shape (numel,); None if they are
                incomplete.
            executor: an executor with one thread, which its owner shuts down.
        """
        self._read = read
        self._executor = executor
        self._lock = threading.Lock()
        self._offered: NewVersion | None = None  # not being read yet
        self._reading: _WeightsReading | None = None  # being read, or read

    def offer(self, weights: NewVersion) -> None:
        """Read these weights as soon as the current read is done."""
        with self._lock:
            is_scheduled = self._offered is not None
            self._offered = weights
        if not is_scheduled:
            self._executor.submit(self._read_offered)

    def take(self, source: Grant | NewVersion) -> Weights | None:
        """Return the weights that `source` names, and drop them from this reader. Wait if they are being read. Return
        None if the weights were not read or could not be read. The caller then reads the weights itself, and gets the
        error if this fails."""
        place = _place(source)
        with self._lock:
            if self._offered is not None and _place(self._offered) <= place:
                self._offered = None  # the caller now reads these or newer weights
            reading = self._reading
            if reading is None or reading.place > place:
                return None
            self._reading = None
        return reading.weights.result() if reading.place == place else None

    def _read_offered(self) -> None:
        with self._lock:
            offered, self._offered = self._offered, None
            if offered is None:
                return
            weights: Future[Weights | None] = Future()
            self._reading = _WeightsReading(_place(offered), weights)
        try:
            weights.set_result(self._read(offered))
        except Exception as exc:
            log.warning("offer_not_read", version=offered.version, reason=str(exc), action="read at the next batch")
            weights.set_result(None)


def _place(source: Grant | NewVersion) -> tuple[int, int]:
    return source.term, source.version


_MAX_DELTAS: Final = 8  # read one after the other: each costs a round trip, like the complete weights


class SlicedDeltaReader:
    """A reader of the deltas of all slices of a model; see `DeltaReader`."""

    def __init__(self, job: str, blobs: Blobs, slices: Slices) -> None:
        self._slices = slices
        self._readers = [
            DeltaReader(job, SliceBlobs(blobs, slices, number), Layout(part.size, part.num_parameters))
            for number, part in enumerate(slices)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(reader.num_bytes for reader in self._readers)

    def keep(self, weights: Weights, source: Grant | NewVersion) -> None:
        for reader, part in zip(self._readers, self._slices, strict=True):
            reader.keep(part.view(weights), source)

    def read(self, source: Grant | NewVersion) -> Weights | None:
        parts = [reader.read(source) for reader in self._readers]
        if len(parts) == 1:
            return parts[0]
        whole = [part for part in parts if part is not None]
        return np.concatenate(whole) if len(whole) == len(parts) else None


class DeltaReader:
    """A reader of deltas, which keeps a copy of the last weights that were read, without own steps. Not thread-safe."""

    def __init__(self, job: str, blobs: Blobs, layout: Layout) -> None:
        self._job = job
        self._blobs = blobs
        self._layout = layout
        self._weights = np.zeros(layout.numel, np.float32)
        self._place = (-1, -1)  # their term and version
        self.num_bytes = 0  # size of the deltas of the last `read`

    def keep(self, weights: Weights, source: Grant | NewVersion) -> None:
        """Keep a copy of `weights`, shape (numel,), which `source` names."""
        self._weights[:] = weights
        self._place = (source.term, source.version)

    def read(self, source: Grant | NewVersion) -> Weights | None:
        """Return the weights that `source` names, shape (numel,), valid until the next call. Return None if the caller
        must read the complete weights, because these are smaller than the deltas, or because the blob store lacks a
        delta."""
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
        except BlobError as exc:  # also NotFiniteError: reading the complete weights gives the error
            log.warning("delta_refused", key=key, reason=str(exc), action="the whole weights are read")
            return None


Deltas: TypeAlias = DeltaReader | SlicedDeltaReader
