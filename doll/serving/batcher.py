"""Requests of all connections are computed together: whatever has come while the batch before was computed.

Nothing waits for more requests to come, and a request that has come alone is computed at once. A batch of a model that
takes less time than a change of threads is computed on the event loop's own thread, else on another one, so that the
loop goes on meanwhile.
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
_TRIED_S: Final = 0.025  # what takes longer on the other thread is not tried on the event loop's
_TRY_EVERY: Final = 16
_REMEMBERED: Final = 9


class QueueFullError(Exception):
    """More requests wait than may wait."""


class _Waiting(NamedTuple):
    features: Features
    answer: asyncio.Future[Answer]
    until_s: float  # monotonic


class BatchTimes:
    """Which thread computes: the event loop's own one if batches usually take less than `INLINE_S` there.

    On the other thread a batch waits for Python's lock, too. So what it takes there does not say what it would take
    here: now and then one is tried here, unless all of them are long. A loaded machine takes the processor away from
    many of them, so that the quarter that was faster counts.

    Attributes:
        were_short: those that were computed here.
    """

    def __init__(self) -> None:
        self._here: deque[float] = deque(maxlen=_REMEMBERED)
        self._elsewhere: deque[float] = deque(maxlen=_REMEMBERED)
        self._untried = 0
        self.were_short = True

    def are_short(self) -> bool:
        """Whether the next batch is to be computed here."""
        if self.were_short:
            return True
        self._untried += 1
        return self._untried % _TRY_EVERY == 0 and _undisturbed(self._elsewhere) < _TRIED_S

    def add(self, seconds: float, *, here: bool) -> None:
        """A batch has taken so long."""
        if here:
            self._here.append(seconds)
            # Of each batch of a small model: a short one more changes nothing.
            self.were_short = (self.were_short and seconds < INLINE_S) or _undisturbed(self._here) < INLINE_S
        else:
            self._elsewhere.append(seconds)


def _undisturbed(values: deque[float]) -> float:
    return sorted(values)[len(values) // 4] if values else 0.0


class Batcher:
    """One queue for each lane and kind of request, served in turn. Of one event loop.

    Args:
        compute: answers a batch; called by one thread at a time.
        max_samples: of a batch, unless one request alone has more.
        max_waiting: requests that may wait.
        time_limit_s: for a request to be answered.
        num_here: requests that this process has and has not answered, with the one that is submitted. Those that have
            come in the same round of the loop are among them.
        on_batch: told how many samples a batch had, and the seconds that it took.
    """

    def __init__(
        self, compute: Compute, executor: Executor, *, max_samples: int, max_waiting: int, time_limit_s: float,
        num_here: Callable[[], int] = lambda: 2,
        on_batch: Callable[[int, float], object] = lambda samples, seconds: None,
    ) -> None:  # fmt: skip
        self._compute = compute
        self._executor = executor
        self._max_samples = max_samples
        self._max_waiting = max_waiting
        self._time_limit_s = time_limit_s
        self._num_here = num_here
        self._on_batch = on_batch
        self._queues: dict[tuple[Lane, Any], deque[_Waiting]] = {}
        self._is_busy = False
        self._batch: list[_Waiting] = []  # that is computed
        self._times = BatchTimes()
        self.num_waiting = 0

    async def submit(self, lane: Lane, features: Features) -> Answer:
        """The answer of `lane`.

        Raises:
            QueueFullError: too many requests wait.
            SampleError: the model does not answer this request; the message says why.
            LookupError: no version has been read yet.
            TimeoutError: it has taken too long.
        """
        is_alone = not self._is_busy and self._num_here() == 1
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
            loop.call_soon(self._next, loop)  # after what else this round of the loop reads
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
        """Give up the requests that have taken too long; to be called several times a second."""
        now_s = time.monotonic()
        for waiting in itertools.chain(self._batch, *self._queues.values()):
            if waiting.until_s <= now_s and not waiting.answer.done():
                waiting.answer.set_exception(TimeoutError())

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Compute the next batch, if requests wait."""
        lane, batch = self._take()
        if lane is None:
            self._is_busy = False
            return
        self._batch = batch
        features = [waiting.features for waiting in batch]
        is_usual = sum(item.num_samples for item in features) <= self._max_samples
        if is_usual and self._times.are_short():
            self._finish(loop, batch, *self._timed(lane, features), here=True)
        else:
            future = loop.run_in_executor(self._executor, self._timed, lane, features)
            future.add_done_callback(lambda done: self._finish(loop, batch, *done.result(), here=False))

    def _take(self) -> tuple[Lane | None, list[_Waiting]]:
        """The first requests of the queue whose turn it is; none if none wait."""
        batch: list[_Waiting] = []
        count = 0
        for key in list(self._queues):
            queue = self._queues.pop(key)
            while queue and (not batch or count + queue[0].features.num_samples <= self._max_samples):
                waiting = queue.popleft()
                self.num_waiting -= 1
                if not waiting.answer.done():  # nobody waits for it any more
                    batch.append(waiting)
                    count += waiting.features.num_samples
            if queue:
                self._queues[key] = queue  # after the others
            if batch:
                return key[0], batch
        return None, batch

    def _timed(self, lane: Lane, features: Sequence[Features]) -> tuple[Sequence[Any] | Exception, float]:
        started_s = time.perf_counter()
        try:
            answers: Sequence[Any] | Exception = self._compute(lane, features)
        except Exception as exc:  # each request is told; the server goes on
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
