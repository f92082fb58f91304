"""Weights that a worker is offered are read while it computes, so that its next grant finds them there.

This is the eager communication of ESSP (Dai et al., AAAI 2015): the server sends, and a worker does not wait for what
it would ask for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from doll.records.control import Grant, NewVersion
from doll.telemetry import get_logger

log = get_logger(__name__)

Weights: TypeAlias = npt.NDArray[np.float32]
Read: TypeAlias = Callable[[Grant | NewVersion], Weights | None]


class _WeightsReading(NamedTuple):
    place: tuple[int, int]  # term, version
    weights: Future[Weights | None]


class WeightsAhead:
    """Reads the newest weights that were offered, one version at a time. Safe to share between threads.

    It holds one version at most: the next read drops what the last one has read, and an offer takes the place of an
    earlier one that is not being read yet.
    """

    def __init__(self, read: Read, executor: Executor) -> None:
        """
        Args:
            read: what the store has under a key, float32, shape (numel,), checked; None if it is not whole.
            executor: of one thread. Its owner shuts it down.
        """
        self._read = read
        self._executor = executor
        self._lock = threading.Lock()
        self._offered: NewVersion | None = None  # not being read yet
        self._reading: _WeightsReading | None = None  # is read, or was

    def offer(self, weights: NewVersion) -> None:
        """Read these as soon as the read that is under way is done."""
        with self._lock:
            is_scheduled = self._offered is not None
            self._offered = weights
        if not is_scheduled:
            self._executor.submit(self._read_offered)

    def take(self, source: Grant | NewVersion) -> Weights | None:
        """The weights that `source` names, which this object holds no longer. Waits if they are being read.

        Returns:
            None if they were not read, or could not be: the caller reads them, and learns what is wrong.
        """
        place = _place(source)
        with self._lock:
            if self._offered is not None and _place(self._offered) <= place:
                self._offered = None  # the caller reads these now, or newer ones
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
