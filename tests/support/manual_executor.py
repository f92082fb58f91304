"""An executor without a thread, for tests that say when its jobs run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any


class ManualExecutor(Executor):
    """Runs its jobs in `run`, or at once."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.jobs: deque[Callable[[], Any]] = deque()
        self._at_once = at_once

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append(lambda: future.set_result(partial(fn, *args, **kwargs)()))
        if self._at_once:
            self.run()
        return future

    def run(self) -> None:
        while self.jobs:
            self.jobs.popleft()()
