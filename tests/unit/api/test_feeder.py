"""Records from a program to a producer: none is lost and none sent twice, whenever producers end."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doll.api.feeder import Feeder
from doll.errors import ConfigError
from doll.producers.feed import Feed
from fuzzing import seeds

_STREAMS = 3
_MAX_BYTES = 1000


@pytest.fixture
def feeders() -> Iterator[Callable[[Iterator[bytes]], Feeder]]:
    made: list[Feeder] = []

    def make(records: Iterator[bytes]) -> Feeder:
        made.append(Feeder(records, _STREAMS, _MAX_BYTES))
        return made[-1]

    yield make
    for feeder in made:
        feeder.close()


@pytest.mark.parametrize("seed", seeds(20))
def test_whenever_producers_end_each_stream_gets_its_samples_once_and_in_order(
    seed: int, feeders: Callable[[Iterator[bytes]], Feeder]
) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, 2000)
    feeder = feeders(b"%d" % number for number in range(count))
    kafka: list[list[int]] = [[] for _ in range(_STREAMS)]
    while sum(map(len, kafka)) < count:
        with Feed(feeder.path, [len(stream) for stream in kafka], _MAX_BYTES) as feed:
            settled = [0] * _STREAMS
            feed.settled = lambda settled=settled: settled  # type: ignore[misc]
            queued: list[tuple[int, bytes]] = []
            ends_after = rng.choice([count, rng.randrange(count + 1)])
            for number, record in enumerate(feed.records()):
                if record is not None:
                    queued.append(record)
                if rng.random() < 0.1 or number >= ends_after:
                    # Kafka takes the records of each stream in their order; some are still on their way.
                    kept = rng.randrange(len(queued) + 1)
                    for stream, value in queued[:kept]:
                        kafka[stream].append(int(value))
                        settled[stream] += 1
                    del queued[:kept]
                    feed.acknowledge(now=True)
                if number >= ends_after:
                    break
            else:
                for stream, value in queued:
                    kafka[stream].append(int(value))
                    settled[stream] += 1
                feed.acknowledge(now=True)
    assert kafka == [list(range(stream, count, _STREAMS)) for stream in range(_STREAMS)]
    assert feeder.error is None


def test_an_iterator_that_waits_does_not_hold_what_came_before(feeders: Callable[[Iterator[bytes]], Feeder]) -> None:
    go_on = threading.Event()

    def slow() -> Iterator[bytes]:
        yield b"first"
        go_on.wait()
        yield b"second"

    feeder = feeders(slow())
    with Feed(feeder.path, [0] * _STREAMS, _MAX_BYTES) as feed:
        records = feed.records()
        assert next(record for record in records if record is not None) == (0, b"first")
        assert next(records) is None
        go_on.set()
        assert next(record for record in records if record is not None) == (1, b"second")
        assert all(record is None for record in records)  # and it ends


def test_what_the_iterator_raises_ends_the_source_and_is_kept(feeders: Callable[[Iterator[bytes]], Feeder]) -> None:
    def broken() -> Iterator[bytes]:
        yield b"good"
        raise ZeroDivisionError("in the program")

    feeder = feeders(broken())
    with Feed(feeder.path, [0] * _STREAMS, _MAX_BYTES) as feed:
        assert [record for record in feed.records() if record is not None] == [(0, b"good")]
    assert isinstance(feeder.error, ZeroDivisionError)


def test_a_record_that_is_too_long_is_named(feeders: Callable[[Iterator[bytes]], Feeder]) -> None:
    feeder = feeders(iter([b"x", b"y" * (_MAX_BYTES + 1)]))
    with Feed(feeder.path, [0] * _STREAMS, _MAX_BYTES) as feed:
        assert [record for record in feed.records() if record is not None] == [(0, b"x")]
    assert isinstance(feeder.error, ConfigError)
    assert "sample 1: expected at most 1000 bytes" in str(feeder.error)


def test_the_iterator_waits_while_kafka_has_not_acknowledged(
    feeders: Callable[[Iterator[bytes]], Feeder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("doll.api.feeder._KEPT_BYTES", 1000)
    feeder = feeders(b"z" * 92 for _ in range(1_000_000))
    with Feed(feeder.path, [0] * _STREAMS, _MAX_BYTES) as feed:
        settled = [0] * _STREAMS
        feed.settled = lambda: settled
        received = 0
        for record in feed.records():
            if record is None:
                break
            received += 1
        assert 10 <= feeder.taken <= 12
        assert received in (10, 11)
        settled[:] = [2, 2, 2]
        feed.acknowledge(now=True)
        more = itertools.islice((record for record in feed.records() if record is not None), 6)
        assert len(list(more)) == 6


def test_without_the_program_the_producer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected the program that feeds this run, which has ended"):
        Feed(tmp_path / "none.sock", [0], _MAX_BYTES)


def test_a_program_that_ends_in_mid_stream_is_no_end_of_the_source() -> None:
    gate = threading.Event()

    def waits() -> Iterator[bytes]:
        yield b"one"
        gate.wait()

    feeder = Feeder(waits(), _STREAMS, _MAX_BYTES)
    with Feed(feeder.path, [0] * _STREAMS, _MAX_BYTES) as feed:
        records = feed.records()
        assert next(record for record in records if record is not None) == (0, b"one")
        feeder.close()
        gate.set()
        with pytest.raises(ConfigError, match="has ended"):
            list(records)
