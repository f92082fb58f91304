"""Computes requests of all connections in batches: requests that arrive while a batch is computed form the next batch.

A batch never waits for more requests, and a single request is computed immediately. If batches take less time than a
switch of threads, they are computed on the thread of the event loop; otherwise on another thread, so that the event
loop continues.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Final, NamedTuple

from doll.errors import SampleError
from doll.serving.model_copies import Lane
from doll.serving.predictor import Answer
from doll.serving.tensors import Features

Compute = Callable[[Lane, Sequence[Features]], Sequence[Answer | SampleError]]
INLINE_S: Final = 0.002
_TRIED_S: Final = 0.025  # longer batches of the other thread are not tried on the event loop's
_TRY_EVERY: Final = 16
_REMEMBERED: Final = 9


class QueueFullError(Exception):
    """The queue is full: too many requests wait."""


class _Waiting(NamedTuple):
    features: Features
    answer: asyncio.Future[Answer]
    until_s: float  # monotonic seconds


class BatchTimes:
    """Decides which thread computes a batch: the thread of the event loop if batches usually take less than `INLINE_S`
    there.

    On the other thread, a batch also waits for Python's lock. So its time there does not predict the time on the event
    loop's thread. For that reason, a batch is tried on the event loop's thread from time to time, unless all batches
    are long. On a loaded machine, many batches are interrupted; therefore only the fastest quarter counts.

    Attributes:
        were_short: whether batches on the event loop's thread were short.
    """

    def __init__(self) -> None:
        self._here: deque[float] = deque(maxlen=_REMEMBERED)
        self._elsewhere: deque[float] = deque(maxlen=_REMEMBERED)
        self._untried = 0
        self.were_short = True

    def are_short(self) -> bool:
        """Return whether to compute the next batch on the event loop's thread."""
        if self.were_short:
            return True
        self._untried += 1
        return self._untried % _TRY_EVERY == 0 and _undisturbed(self._elsewhere) < _TRIED_S

    def add(self, seconds: float, *, here: bool) -> None:
        """Add the time that a batch has taken on the event loop's thread (`here`) or on the other one."""
        if here:
            self._here.append(seconds)
            # Evaluated first, because for a small model each batch is short.
            self.were_short = (self.were_short and seconds < INLINE_S) or _undisturbed(self._here) < INLINE_S
        else:
            self._elsewhere.append(seconds)


def _undisturbed(values: deque[float]) -> float:
    return sorted(values)[len(values) // 4] if values else 0.0


class Batcher:
    """Queues the requests of one event loop, with one queue for each lane and kind, and serves the queues in turn.

    Args:
        compute: answers a batch; only one thread at a time calls it.
        max_samples: maximum number of samples of a batch; a single request may have more.
        max_waiting: maximum number of waiting requests.
        time_limit_s: time limit for the answer to a request.
        num_here: returns the number of unanswered requests of this process, including the submitted one and requests
            that have arrived in the same round of the event loop.
        on_batch: called with the number of samples of a batch and the seconds that it took.
        is_inline: whether short batches may be computed on the thread of the event loop.
    """

    def __init__(
        self, compute: Compute, executor: Executor, *, max_samples: int, max_waiting: int, time_limit_s: float,
        num_here: Callable[[], int] = lambda: 2,
        on_batch: Callable[[int, float], object] = lambda samples, seconds: None, is_inline: bool = True,
    ) -> None:  # fmt: skip
        self._compute = compute
        self._executor = executor
        self._max_samples = max_samples
        self._max_waiting = max_waiting
        self._time_limit_s = time_limit_s
        self._num_here = num_here
        self._on_batch = on_batch
        self._is_inline = is_inline
        self._queues: dict[tuple[Lane, Any], deque[_Waiting]] = {}
        self._is_busy = False
        self._batch: list[_Waiting] = []  # the batch that is being computed
        self._times = BatchTimes()
        self.num_waiting = 0

    async def submit(self, lane: Lane, features: Features) -> Answer:
        """Return the answer of `lane`.

        Raises:
            QueueFullError: too many requests wait.
            SampleError: the model cannot answer this request; the message states the reason.
            LookupError: no version has been read yet.
            TimeoutError: the time limit has passed.
        """
        is_alone = self._is_inline and not self._is_busy and self._num_here() == 1
        if is_alone and self._times.were_short and features.num_samples <= self._max_samples:
            return self._alone(lane, features)
        if self.num_waiting >= self._max_waiting:
            raise QueueFullError(f"{self.num_waiting} requests wait already")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(features, loop.create_future(), time.monotonic() + self._time_limit_s)
        self._queues.setdefault((lane, features.kind), deque()).append(waiting)
        self.num_waiting += 1
        if not self._is_busy:
            self._is_busy = True
            loop.call_soon(self._next, loop)  # after the other requests that this round of the loop reads
        return await waiting.answer

    def _alone(self, lane: Lane, features: Features) -> Answer:
        answers, took_s = self._timed(lane, (features,))
        self._times.add(took_s, here=True)
        self._on_batch(features.num_samples, took_s)
        answer: Answer | Exception = answers if isinstance(answers, Exception) else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def expire(self) -> None:
        """End the requests whose time limit has passed. Call this method several times per second."""
        now_s = time.monotonic()
        for waiting in itertools.chain(self._batch, *self._queues.values()):
            if waiting.until_s <= now_s and not waiting.answer.done():
                waiting.answer.set_exception(TimeoutError())

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Compute the next batch if requests wait."""
        lane, batch = self._take()
        if lane is None:
            self._is_busy = False
            return
        self._batch = batch
        features = [waiting.features for waiting in batch]
        is_usual = sum(item.num_samples for item in features) <= self._max_samples
        if self._is_inline and is_usual and self._times.are_short():
            self._finish(loop, batch, *self._timed(lane, features), here=True)
        else:
            future = loop.run_in_executor(self._executor, self._timed, lane, features)
            future.add_done_callback(lambda done: self._finish(loop, batch, *done.result(), here=False))

    def _take(self) -> tuple[Lane | None, list[_Waiting]]:
        """Return the lane and the first requests of the queue whose turn it is; no lane if no request waits."""
        batch: list[_Waiting] = []
        count = 0
        for key in list(self._queues):
            queue = self._queues.pop(key)
            while queue and (not batch or count + queue[0].features.num_samples <= self._max_samples):
                waiting = queue.popleft()
                self.num_waiting -= 1
                if not waiting.answer.done():  # otherwise nobody waits for the answer
                    batch.append(waiting)
                    count += waiting.features.num_samples
            if queue:
                self._queues[key] = queue  # behind the other queues
            if batch:
                return key[0], batch
        return None, batch

    def _timed(self, lane: Lane, features: Sequence[Features]) -> tuple[Sequence[Any] | Exception, float]:
        started_s = time.perf_counter()
        try:
            answers: Sequence[Any] | Exception = self._compute(lane, features)
        except Exception as exc:  # each request gets the error; the server continues
            answers = exc
        return answers, time.perf_counter() - started_s

    def _finish(
        self, loop: asyncio.AbstractEventLoop, batch: Sequence[_Waiting], answers: Sequence[Any] | Exception,
        took_s: float, *, here: bool,
    ) -> None:  # fmt: skip
        self._batch = []
        self._times.add(took_s, here=here)
        self._on_batch(sum(waiting.features.num_samples for waiting in batch), took_s)
        if isinstance(answers, Exception):
            answers = [answers] * len(batch)
        for waiting, answer in zip(batch, answers, strict=True):
            if waiting.answer.done():
                continue
            if isinstance(answer, Exception):
                waiting.answer.set_exception(answer)
            else:
                waiting.answer.set_result(answer)
        loop.call_soon(self._next, loop)
