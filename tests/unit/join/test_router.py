"""Wrong clocks: of a record, of a partition, of a joiner. None closes windows early, or keeps all of them open."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaException
from doll.config.join import JoinConfig
from doll.join.router import Read, Router
from doll.join.watermarks import BrokerClock
from doll.kafka import group_stream
from doll.kafka.group_stream import GroupStream, Place

NOW = 1_790_000_000_000
WINDOW_MS, LATENESS_MS = 5_000, 2_000


def new_router(partitions: int = 1) -> Router:
    join = JoinConfig.model_validate(
        {
            "features": {"topic": "f"}, "labels": [{"topic": "l", "name": "y"}], "window_s": WINDOW_MS / 1000,
            "lateness_s": LATENESS_MS / 1000, "max_ahead_s": 60.0,
        }
    )  # fmt: skip
    router = Router(join, 1, 1000)
    for topic in ("f", "l"):
        for partition in range(partitions):
            router.begin(topic, partition, 0)
    return router


def add(router: Router, topic: str, partition: int, *times_ms: int) -> None:
    count = len(times_ms)
    offset = router.next_offsets[router.source_of(topic), partition]
    read = Read(range(offset, offset + count), [b"{}"] * count, [b"k"] * count, [(1, item) for item in times_ms])
    router.add(topic, partition, read, NOW)


def watermarks(router: Router) -> dict[tuple[int, int], int]:
    return {(item.source, item.partition): item.time_ms for _, pack in router.take(NOW) for item in pack.progress}


def test_an_event_of_the_future_closes_no_window_before_its_time() -> None:
    router = new_router()
    add(router, "l", 0, NOW - 10, NOW + 50_000)
    assert watermarks(router) == {(1, 0): NOW}


def test_an_event_of_the_far_future_is_refused_and_moves_nothing() -> None:
    router = new_router()
    add(router, "l", 0, NOW - 10, NOW + 61_000, NOW + 10**11)
    assert [(item.offset, item.code) for item in router.refused] == [(1, "ahead"), (2, "ahead")]
    assert "61 s in the future" in router.refused[0].reason
    assert watermarks(router) == {(1, 0): NOW - 10}


def test_a_partition_that_was_read_to_its_end_is_at_the_present() -> None:
    router = new_router()
    assert router.read_until({(1, 0): NOW}, NOW, -1) == []
    assert watermarks(router) == {(1, 0): NOW}


def test_a_partition_whose_clock_is_behind_follows_the_others_by_a_window() -> None:
    router, day_ms = new_router(2), 86_400_000
    add(router, "l", 0, NOW - 100)
    add(router, "l", 1, NOW - 3 * day_ms)
    busy = {(1, 0): NOW - 1000, (1, 1): NOW - 1000}
    assert router.read_until(busy, NOW, -1) == [(1, 1)]
    assert watermarks(router) == {(1, 0): NOW - 100, (1, 1): NOW - 1000 - WINDOW_MS - LATENESS_MS}
    assert router.read_until(busy, NOW, -1) == [], "the newest event time is the same"
    assert router.read_until(busy, NOW, NOW + 10**9) == []


def test_a_stream_of_the_past_goes_by_its_own_time() -> None:
    """No clock is wrong if all partitions are a year behind: the join is fed from an archive."""
    router, then_ms = new_router(2), NOW - 365 * 86_400_000
    for partition in (0, 1):
        add(router, "f", partition, then_ms + 3000 * partition)
        add(router, "l", partition, then_ms + 1000)
    assert router.read_until({(1, 0): NOW - 5, (1, 1): NOW - 5}, NOW, then_ms) == []
    assert watermarks(router)[1, 0] == then_ms + 1000


@pytest.mark.parametrize(
    ("sent_ms", "written_ms", "confirmed_ms", "correction_ms"),
    [
        (0, 5, 9, 0), (0, 0, 0, 0), (1000, 1000, 61_000, 0),  # the clocks may be equal; Kafka was slow
        (0, 3_600_005, 9, 3_599_996),  # this clock is behind
        (3_600_000, 5, 3_600_009, -3_600_004),  # and ahead
    ],
)  # fmt: skip
def test_a_joiner_goes_by_the_clock_of_the_broker(
    sent_ms: int, written_ms: int, confirmed_ms: int, correction_ms: int
) -> None:
    clock = BrokerClock()
    clock.note(sent_ms, written_ms, confirmed_ms)
    assert clock.correction_ms == correction_ms
    clock.note(10, 11, 12)
    assert clock.correction_ms == 0, "the clock was set"


def test_a_partition_has_been_read_until_the_time_when_its_end_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = object.__new__(GroupStream)
    place = ("l", 0)
    stream._admin, stream._asked, stream.at_end, stream._next = None, {}, {}, {place: 0, ("log", 0): 7}
    end = 0

    def ends(admin: object, partitions: list[Any], spec: object) -> dict[Place, int]:
        assert [(item.topic, item.partition) for item in partitions] == [place]
        if end < 0:
            raise KafkaException("no leader")
        return {place: end}

    def read(now_ms: int, *, next_offset: int, ends_at: int) -> dict[Place, int]:
        nonlocal end
        stream._next[place], end = next_offset, ends_at
        return dict(stream.read_until(["l"], now_ms))

    monkeypatch.setattr(group_stream, "list_offsets", ends)
    assert read(1, next_offset=0, ends_at=0) == {place: 1}, "empty"
    assert read(2, next_offset=5, ends_at=9) == {place: 1}
    assert read(3, next_offset=8, ends_at=12) == {}, "offset 8 was there at 2"
    assert read(4, next_offset=9, ends_at=15) == {place: 2}
    assert read(5, next_offset=9, ends_at=-1) == {}, "Kafka does not answer"
    stream.at_end[place] = 16  # the mark of a transaction is after the last record
    assert read(6, next_offset=15, ends_at=16) == {place: 6}
    assert stream.read_until(["other"], 7) == {}
