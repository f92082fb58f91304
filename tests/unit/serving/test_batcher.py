"""Requests that have come while a batch was computed are the next batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from doll.errors import SampleError
from doll.serving.batcher import INLINE_S, Batcher, BatchTimes, QueueFullError
from doll.serving.model_copies import Lane
from doll.serving.tensors import Features

pytestmark = pytest.mark.slow  # loads torch
LANE = Lane("latest")


def features(value: float, count: int = 1, kind: Any = ()) -> Features:
    return Features(np.full((count, 1), value), count, kind)


class Computed:
    """Echoes what it gets; holds its first batch until `go`. The sizes of the batches are kept."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.threads: list[str] = []
        self.go = threading.Event()
        self.began = threading.Event()

    def __call__(self, lane: Lane, batch: Sequence[Features]) -> list[Any]:
        self.batches.append([float(item.x[0, 0]) for item in batch])
        self.threads.append(threading.current_thread().name)
        self.began.set()
        assert self.go.wait(60)
        return [SampleError("seven") if item.x[0, 0] == 7 else float(item.x[0, 0]) for item in batch]


def run(
    scenario: Callable[[Batcher, Computed], Any], *, max_waiting: int = 100, time_limit_s: float = 60.0
) -> Computed:
    computed = Computed()

    async def main() -> None:
        with ThreadPoolExecutor(1, "compute") as executor:
            batcher = Batcher(computed, executor, max_samples=4, max_waiting=max_waiting, time_limit_s=time_limit_s)
            for here in (True, False):
                batcher._times.add(1.0, here=here)  # the loop itself computes nothing
            await scenario(batcher, computed)

    asyncio.run(main())
    return computed


async def begun(batcher: Batcher, computed: Computed, *values: float) -> list[asyncio.Task[Any]]:
    """The first request is being computed, and the others wait."""
    tasks = [asyncio.create_task(batcher.submit(LANE, features(values[0])))]
    await asyncio.get_running_loop().run_in_executor(None, computed.began.wait, 60)
    tasks += [asyncio.create_task(batcher.submit(LANE, features(value))) for value in values[1:]]
    await asyncio.sleep(0)
    return tasks


def test_what_waits_is_computed_together_up_to_the_limit() -> None:
    async def scenario(batcher: Batcher, computed: Computed) -> None:
        tasks = await begun(batcher, computed, 1, 2, 3, 4, 5, 6)
        computed.go.set()
        assert await asyncio.gather(*tasks) == [1, 2, 3, 4, 5, 6]

    assert run(scenario).batches == [[1], [2, 3, 4, 5], [6]]


def test_one_request_may_have_more_samples_than_a_batch() -> None:
    async def scenario(batcher: Batcher, computed: Computed) -> None:
        computed.go.set()
        assert await batcher.submit(LANE, features(1, count=100)) == 1

    assert run(scenario).batches == [[1]]


def test_kinds_and_lanes_take_turns() -> None:
    async def scenario(batcher: Batcher, computed: Computed) -> None:
        (first,) = await begun(batcher, computed, 0)
        other = Lane("stable")
        wanted = [(LANE, "a", 1), (LANE, "a", 2), (LANE, "b", 3), (other, "a", 4), (LANE, "a", 5)]
        tasks = [asyncio.create_task(batcher.submit(lane, features(value, kind=kind))) for lane, kind, value in wanted]
        await asyncio.sleep(0)
        computed.go.set()
        assert await asyncio.gather(first, *tasks) == [0, 1, 2, 3, 4, 5]

    assert run(scenario).batches == [[0], [1, 2, 5], [3], [4]]


def test_each_request_gets_its_own_error() -> None:
    async def scenario(batcher: Batcher, computed: Computed) -> None:
        tasks = await begun(batcher, computed, 1, 7, 2)
        computed.go.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [answer if isinstance(answer, float) else str(answer) for answer in answers] == [1, "seven", 2]

    run(scenario)


def test_what_cannot_be_computed_ends_no_other_request() -> None:
    async def scenario(batcher: Batcher, computed: Computed) -> None:
        computed.go.set()
        with pytest.raises(IndexError):
            await batcher.submit(LANE, Features(np.empty((0, 0)), 1, ()))
        assert await batcher.submit(LANE, features(2)) == 2

    run(scenario)


def test_a_full_queue_refuses() -> None:
    async def scenario(batcher: Batcher, computed: Computed) -> None:
        tasks = await begun(batcher, computed, 1, 2, 3)
        with pytest.raises(QueueFullError, match="2 requests wait already"):
            await batcher.submit(LANE, features(4))
        computed.go.set()
        assert await asyncio.gather(*tasks) == [1, 2, 3]
        assert batcher.num_waiting == 0

    run(scenario, max_waiting=2)


def test_a_request_whose_client_has_gone_is_not_computed() -> None:
    async def scenario(batcher: Batcher, computed: Computed) -> None:
        tasks = await begun(batcher, computed, 1, 2, 3)
        tasks[1].cancel()
        await asyncio.sleep(0)
        computed.go.set()
        assert await tasks[2] == 3

    assert run(scenario).batches == [[1], [3]]


def test_a_request_that_takes_too_long_is_given_up_computed_or_not() -> None:
    async def scenario(batcher: Batcher, computed: Computed) -> None:
        tasks = await begun(batcher, computed, 1, 2)
        batcher.expire()
        computed.go.set()
        assert [type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)] == [TimeoutError] * 2

    run(scenario, time_limit_s=0.0)


def test_the_loop_itself_computes_what_takes_no_time_there() -> None:
    times = BatchTimes()
    assert times.are_short(), "it is tried"
    times.add(2 * INLINE_S, here=True)
    times.add(3 * INLINE_S, here=False)
    tried = [at for at in range(1, 101) if times.are_short()]
    assert tried == [16, 32, 48, 64, 80, 96], "it may have been the first batch only"
    times.add(INLINE_S / 10, here=True)
    assert times.are_short()
    for _ in range(9):
        times.add(2 * INLINE_S, here=True)
        times.add(1.0, here=False)
    assert not any(times.are_short() for _ in range(100)), "long ones are not tried"


def test_a_request_that_has_come_alone_is_computed_at_once_and_others_together() -> None:
    here = [1]
    computed = Computed()
    computed.go.set()
    finished: list[tuple[int, float]] = []

    async def main() -> None:
        with ThreadPoolExecutor(1, "compute") as executor:
            batcher = Batcher(
                computed, executor, max_samples=4, max_waiting=100, time_limit_s=60.0, num_here=lambda: here[0],
                on_batch=lambda samples, seconds: finished.append((samples, seconds)),
            )  # fmt: skip
            answer = batcher.submit(LANE, features(1))
            with pytest.raises(StopIteration) as ended:
                answer.send(None)  # without a turn of the event loop
            assert ended.value.value == 1
            with pytest.raises(SampleError, match="seven"):
                batcher.submit(LANE, features(7)).send(None)
            here[0] = 2
            assert await asyncio.gather(*(batcher.submit(LANE, features(value)) for value in (2, 3))) == [2, 3]
            here[0] = 1
            assert await batcher.submit(LANE, features(4, count=5)) == 4, "one of more samples than a batch"

    asyncio.run(main())
    assert computed.batches == [[1], [7], [2, 3], [4]]
    assert computed.threads[:3] == ["MainThread"] * 3
    assert computed.threads[3] != "MainThread", "it would hold the event loop up"
    assert [samples for samples, _ in finished] == [1, 1, 2, 5]


def test_a_request_alone_of_a_model_that_takes_long_is_computed_on_the_other_thread() -> None:
    computed = Computed()
    computed.go.set()

    async def main() -> None:
        with ThreadPoolExecutor(1, "compute") as executor:
            batcher = Batcher(computed, executor, max_samples=4, max_waiting=100, time_limit_s=60.0, num_here=lambda: 1)
            for here in (True, False):
                batcher._times.add(1.0, here=here)
            assert await batcher.submit(LANE, features(1)) == 1

    asyncio.run(main())
    assert computed.threads != ["MainThread"]
