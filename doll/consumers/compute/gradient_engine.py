"""Port: where a worker's gradients are computed, away from its event loop.

That is one thread of the worker's process, or a pipeline of stages (`doll.consumers.pipeline.pipeline_engine`), which
takes several grants at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeAlias

from doll.consumers.protocol.worker_core import Batch, GradientDone
from doll.records.control import Grant, NewVersion

# (batch, grant id) -> whether a set may go on with this batch. Called between two batches, from the engine's thread.
GoesOn: TypeAlias = Callable[[int, int], bool]
Handle: TypeAlias = Callable[[Grant, Sequence[Batch], GoesOn], GradientDone | None]


class GradientEngine(Protocol):
    """Computes what it is given, in that order. Called from one thread; the futures are set by another.

    Attributes:
        depth: how many grants may be under way at once. An engine that takes several is given one batch at a time.
    """

    @property
    def depth(self) -> int: ...

    def submit(self, grant: Grant, batches: Sequence[Batch], goes_on: GoesOn) -> Future[GradientDone | None]:
        """The sum of the gradients of `batches` at weights that `grant` allows, stored; None: these weights are gone.

        The set may end early, after its first batch or later: where `goes_on` says so, or where it has taken as long as
        a set may take. The caller submits the rest.

        Futures are done in the order of submission: the server takes a stream's gradients in their order only.
        Fails with TaskError (the task's fault), ServiceUnavailableError, or whatever else went wrong.
        """
        ...

    def offer(self, weights: NewVersion) -> None:
        """There are newer weights: what is submitted from now on is not computed on older ones, if its grant allows
        these."""

    def store_rest(self, until: int) -> Future[GradientDone]:
        """Store what was computed and is not pushed: kept for a later push, or held back of the steps of batches below
        `until`. Fails as `submit`."""
        ...

    def stop(self) -> None:
        """Begin nothing more: the worker leaves. Batches that were submitted and not begun are answered with a
        `GradientDone` of no batches."""

    def close(self) -> None:
        """Wait for what is under way, and drop the rest."""


class ThreadGradientEngine:
    """`GradientEngine` of one thread, so torch never runs beside itself. It computes and does nothing else."""

    depth = 1

    def __init__(
        self,
        handle: Handle,
        offer: Callable[[NewVersion], object] = lambda weights: None,
        store_rest: Callable[[int], GradientDone] = lambda until: GradientDone("", 0, ()),
    ) -> None:
        """
        Args:
            offer: see `GradientEngine.offer`; called from the caller's thread.
        """
        self._handle = handle
        self._offer = offer
        self._store_rest = store_rest
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch")

    def submit(self, grant: Grant, batches: Sequence[Batch], goes_on: GoesOn) -> Future[GradientDone | None]:
        return self._executor.submit(self._handle, grant, batches, goes_on)

    def offer(self, weights: NewVersion) -> None:
        self._offer(weights)

    def store_rest(self, until: int) -> Future[GradientDone]:
        return self._executor.submit(self._store_rest, until)

    def stop(self) -> None:
        pass  # `goes_on` ends a set

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
