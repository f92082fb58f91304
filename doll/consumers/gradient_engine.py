"""Port: where a worker's gradients are computed, away from its event loop.

Today that is one thread of the worker's process. A process of its own, a GPU, or a pipeline of stages (several grants
under way at once) are further adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from doll.consumers.worker import Batch, GradientDone
from doll.records import Grant


class GradientEngine(Protocol):
    """Computes what it is given, in that order. Called from one thread; the futures are set by another.

    Attributes:
        depth: how many gradients may be under way at once.
    """

    @property
    def depth(self) -> int: ...

    def submit(self, grant: Grant, batch: Batch) -> Future[GradientDone | None]:
        """The gradient of `batch` at weights that `grant` allows, stored; None: these weights are gone.

        Futures are done in the order of submission: the server takes a stream's gradients in their order only.
        Fails with TaskError (the task's fault), ServiceUnavailableError, or whatever else went wrong.
        """
        ...

    def close(self) -> None:
        """Wait for what is under way, and drop the rest."""


class ThreadGradientEngine:
    """`GradientEngine` of one thread, so torch never runs beside itself. It computes and does nothing else."""

    depth = 1

    def __init__(self, handle: Callable[[Grant, Batch], GradientDone | None]) -> None:
        self._handle = handle
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch")

    def submit(self, grant: Grant, batch: Batch) -> Future[GradientDone | None]:
        return self._executor.submit(self._handle, grant, batch)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
