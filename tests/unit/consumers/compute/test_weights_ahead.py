"""What is offered is read beside the computation: the newest only, one version held, and never a wrong one."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from doll.consumers.compute.weights_ahead import WeightsAhead
from doll.errors import ServiceUnavailableError
from doll.records.control import Grant, NewVersion
from manual_executor import ManualExecutor
from worker_records import grant


def offer(version: int, term: int = 3) -> NewVersion:
    return NewVersion(term=term, worker=1, version=version, key=f"{term}:{version}")


class Store:
    """Weights that are all equal to their version."""

    def __init__(self) -> None:
        self.executor = ManualExecutor()
        self.read: list[str] = []
        self.failure: Exception | None = None
        self.ahead = WeightsAhead(self.weights, self.executor)

    def weights(self, source: Grant | NewVersion) -> npt.NDArray[np.float32] | None:
        self.read.append(source.key)
        if self.failure is not None:
            raise self.failure
        return np.full(3, source.version, np.float32)


def test_what_was_offered_is_there_when_the_grant_comes_and_is_handed_over_once() -> None:
    store = Store()
    store.ahead.offer(offer(4))
    store.executor.run()
    assert store.read == ["3:4"]
    weights = store.ahead.take(grant(5, version=4))
    assert weights is not None
    assert (weights == 4).all()
    assert store.ahead.take(offer(4)) is None, "the replica holds it now"


def test_only_the_newest_offer_that_is_not_begun_is_read() -> None:
    store = Store()
    for version in (4, 5, 6):
        store.ahead.offer(offer(version))
    assert len(store.executor.jobs) == 1, "the queue does not grow with the offers"
    store.executor.run()
    assert store.read == ["3:6"]


def test_an_offer_that_the_caller_reads_itself_is_not_read_twice() -> None:
    store = Store()
    store.ahead.offer(offer(4))
    assert store.ahead.take(grant(5, version=6)) is None
    store.executor.run()
    assert store.read == []
    store.ahead.offer(offer(7))
    store.executor.run()
    assert store.read == ["3:7"]


def test_a_newer_version_that_was_read_stays_for_its_grant_and_an_older_one_is_dropped() -> None:
    store = Store()
    store.ahead.offer(offer(6))
    store.executor.run()
    assert store.ahead.take(grant(5, version=4)) is None
    assert store.ahead.take(offer(6, term=4)) is None, "the same number of another server is another version"
    assert store.ahead.take(offer(6)) is None, "weights of a fenced server are dropped"


def test_what_cannot_be_read_is_the_callers_to_read() -> None:
    store = Store()
    store.failure = ServiceUnavailableError("Redis is unreachable")
    store.ahead.offer(offer(4))
    store.executor.run()
    assert store.ahead.take(offer(4)) is None
    store.failure = None
    store.ahead.offer(offer(5))
    store.executor.run()
    assert store.ahead.take(offer(5)) is not None


def test_a_grant_waits_for_the_read_that_is_under_way_and_does_not_begin_another() -> None:
    begun, go_on = threading.Event(), threading.Event()
    reads: list[int] = []

    def read(source: Grant | NewVersion) -> npt.NDArray[np.float32]:
        reads.append(source.version)
        begun.set()
        assert go_on.wait(60)
        return np.full(3, source.version, np.float32)

    with ThreadPoolExecutor(1) as executor, ThreadPoolExecutor(1) as caller:
        ahead = WeightsAhead(read, executor)
        ahead.offer(offer(4))
        assert begun.wait(60)
        taken = caller.submit(ahead.take, offer(4))
        go_on.set()
        weights = taken.result(60)
    assert weights is not None
    assert (weights == 4).all()
    assert reads == [4]


def test_in_any_order_of_offers_reads_and_grants_what_is_taken_is_what_was_asked_for() -> None:
    rng, taken = random.Random(5), 0
    for _ in range(200):
        store, newest, term = Store(), 0, 1
        for _ in range(40):
            match rng.randrange(5):
                case 0 | 1:
                    newest += rng.randrange(3)
                    store.ahead.offer(offer(newest, term))
                case 2:
                    store.executor.run()
                case 3:
                    version = max(0, newest - rng.randrange(2))
                    if (weights := store.ahead.take(offer(version, term))) is not None:
                        taken += 1
                        assert store.read[-1] == f"{term}:{version}"
                        assert (weights == version).all()
                case 4 if rng.random() < 0.1:
                    term, newest = term + 1, 0
    assert taken > 100
