"""Blobs of a far store that are read at the same time."""

from __future__ import annotations

import threading

import pytest
from doll.errors import ServiceUnavailableError
from doll.process.threads import in_thread
from doll.storage.reads_ahead import ReadsAhead

WAIT_S = 30.0


class Store:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = threading.Event()
        self.all_asked = threading.Semaphore(0)

    def get(self, key: str) -> bytes | None:
        self.asked.append(key)
        self.all_asked.release()
        assert self.go.wait(WAIT_S)
        if key == "broken":
            raise ServiceUnavailableError("no")
        return None if key == "gone" else key.encode()

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self.all_asked.acquire(timeout=WAIT_S)


def test_they_are_on_their_way_at_once_and_each_is_read_once() -> None:
    store = Store()
    ahead = ReadsAhead(store.get, 4)
    ahead.begin(["a", "gone"])
    ahead.begin(["gone", "broken"])
    store.wait_for(3)  # none has been answered
    assert ahead.is_reading("a")
    assert not ahead.is_reading("b")
    store.go.set()
    assert ahead.get("a") == b"a"
    assert ahead.get("gone") is None
    with pytest.raises(ServiceUnavailableError):
        ahead.get("broken")
    assert not ahead.is_reading("a")
    assert sorted(store.asked) == ["a", "broken", "gone"]
    assert ahead.get("a") == b"a"  # again: it may have changed
    assert len(store.asked) == 4


def test_no_more_than_there_is_memory_for() -> None:
    store = Store()
    store.go.set()
    ahead = ReadsAhead(store.get, 2)
    ahead.begin(["a", "b", "c"])
    store.wait_for(2)
    ahead.begin(["d"])
    store.wait_for(1)
    ahead.forget("b")
    assert ahead.get("a") == b"a"  # forgotten for "d"
    assert store.asked.count("a") == 2
    assert "c" not in store.asked
    nothing = ReadsAhead(store.get, 0)
    nothing.begin(["e"])
    assert "e" not in store.asked


def test_what_a_thread_raises_is_raised_where_its_result_is_asked_for() -> None:
    def fail() -> None:
        raise ServiceUnavailableError("away")

    with pytest.raises(ServiceUnavailableError, match="away"):
        in_thread(fail, "test").result(WAIT_S)
