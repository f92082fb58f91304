"""Computes requests a second time with another version, after their users have the answers.

Users never get these answers, and do not wait for them: they are computed on a thread of the lowest priority, and a
request that comes while several wait is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from doll.errors import SampleError
from doll.serving.batcher import Batcher, QueueFullError
from doll.serving.model_copies import Lane
from doll.serving.predictor import Answer
from doll.serving.tensors import Features

MAX_WAITING: Final = 16
_TIME_LIMIT_S: Final = 30.0
_NICENESS: Final = 19


def low_priority_executor() -> ThreadPoolExecutor:
    """Return an executor of one thread, which gets what other threads leave (where threads have priorities)."""

    def begin() -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)

    return ThreadPoolExecutor(1, "shadow", initializer=begin)


class Shadow:
    """Sends requests to a lane that answers no user.

    Args:
        compute: as of `Batcher`, for its own thread.
        on_answered, on_skipped: called for each request that was computed, or left out.
    """

    def __init__(
        self, lane: Lane, compute: Any, executor: ThreadPoolExecutor, *, max_samples: int,
        on_answered: Callable[[], object], on_skipped: Callable[[], object],
    ) -> None:  # fmt: skip
        self.lane = lane
        self.batcher = Batcher(
            compute, executor, max_samples=max_samples, max_waiting=MAX_WAITING, time_limit_s=_TIME_LIMIT_S,
            is_inline=False,
        )  # fmt: skip
        self._on_answered, self._on_skipped = on_answered, on_skipped
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, features: Features, write: Callable[[Answer], object]) -> None:
        """Compute a request, and call `write` with the answer. Call it in the event loop."""
        if self.lane.copy is None or self.batcher.num_waiting >= MAX_WAITING:
            self._on_skipped()
            return
        task = asyncio.get_running_loop().create_task(self._compute(features, write))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compute(self, features: Features, write: Callable[[Answer], object]) -> None:
        try:
            write(await self.batcher.submit(self.lane, features))
        except (QueueFullError, SampleError, LookupError, TimeoutError):
            self._on_skipped()
        else:
            self._on_answered()
