"""Reader: positions, history, what does not decode, and where partitions end."""

from __future__ import annotations

import time
from typing import Any

import pytest
import raw_batches
from doll.config import JobConfig, parse
from doll.errors import ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.publisher import Publisher
from doll.kafka.range_reader import RangeReader
from doll.kafka.reader import Partition, PrefetchedBounds, Reader, Tail, from_end, unreadable_headers
from doll.records.control import Hello, encode
from doll.services import Services

pytestmark = pytest.mark.integration


@pytest.fixture
def config(services: Services, job_name: str) -> JobConfig:
    config = parse(f"job: {job_name}\ntask: {{class: 'a:B'}}\ndata: {{workers: 2}}\n")
    topics.ensure(config, services)
    return config


def write(config: JobConfig, services: Services, kind: str, *values: bytes, partition: int = 0) -> None:
    with Publisher(config, services) as publisher:
        for value in values:
            publisher.send(config.topic(kind), value, partition=partition)  # type: ignore[arg-type]
        assert publisher.flush(30.0) == 0


def poll_values(reader: Reader, count: int) -> list[bytes | None]:
    values: list[bytes | None] = []
    deadline_s = time.monotonic() + 60
    while len(values) < count:
        assert time.monotonic() < deadline_s
        values += [message.value for message in reader.messages(0.2)]
    return values


def test_each_partition_is_read_from_its_start_and_its_position_follows(config: JobConfig, services: Services) -> None:
    write(config, services, "commands", b"a", b"b", b"c")
    write(config, services, "commands", b"d", partition=1)
    first, second = (Partition(config.topic("commands"), number) for number in range(2))
    with Reader(config, services, "test", (first, second), lambda partition, low, high: high - 1) as reader:
        assert (reader.ends, reader.positions) == ({first: 3, second: 1}, {first: 2, second: 0})
        assert not reader.has_read_history(first)
        assert sorted(map(str, poll_values(reader, 2))) == sorted(map(str, (b"c", b"d")))
        assert reader.positions == {first: 3, second: 1}
        assert reader.has_read_history(first)
        assert reader.is_caught_up()
        write(config, services, "commands", b"e")
        assert not reader.is_caught_up()
        assert poll_values(reader, 1) == [b"e"]
        assert reader.partition_ends(config.topic("commands"), 2) == [4, 1]
        assert reader.bounds(Partition(config.topic("events"))) == (0, 0)


def test_the_bounds_of_many_partitions_come_at_once(services: Services, job_name: str) -> None:
    config = parse(f"job: {job_name}\ntask: {{class: 'a:B'}}\ndata: {{workers: 2, partitions: 40}}\n")
    topics.ensure(config, services)
    samples = config.topic("samples")
    for partition in (0, 7, 39):
        write(config, services, "samples", *[b"x"] * (partition + 1), partition=partition)
    expected = {number: (0, number + 1 if number in (0, 7, 39) else 0) for number in range(40)}
    with RangeReader(config, services) as reader:
        assert reader.bounds_of_partitions(samples, range(40)) == expected
        assert reader.bounds_of_partitions(samples, [7]) == {7: (0, 8)}
        assert reader.bounds_of_partitions(samples, []) == {}
        asked: list[int] = []

        def bounds_of(topic: str, partition: int) -> tuple[int, int]:
            asked.append(partition)
            return reader.bounds(topic, partition)

        bounds = PrefetchedBounds(bounds_of, reader.bounds_of_partitions, range(40))
        assert {number: bounds(samples, number) for number in range(40)} == expected
        assert asked == []
        write(config, services, "samples", b"x", partition=7)
        assert (bounds(samples, 7), asked) == ((0, 9), [7]), "asked again, it asks again"
    with Tail(config, services, (config.topic("updates"),)) as tail:
        assert tail.partition_ends(samples, 40) == [1, *[0] * 6, 9, *[0] * 31, 40]
        assert tail.bounds_of_partitions(samples, range(1, 3)) == {1: (0, 0), 2: (0, 0)}


def test_from_the_end_only_what_comes_later_is_read(config: JobConfig, services: Services) -> None:
    write(config, services, "events", b"old")
    with Reader(config, services, "test", (Partition(config.topic("events")),), from_end) as reader:
        write(config, services, "events", b"new")
        assert poll_values(reader, 1) == [b"new"]


def test_records_come_with_their_time_and_what_does_not_decode_is_counted(
    config: JobConfig, services: Services
) -> None:
    written_s = time.time()
    write(config, services, "events", encode(Hello(term=1)), b"rubbish", b"", encode(Hello(term=2)))
    with Reader(config, services, "test", (Partition(config.topic("events")),)) as reader:
        history = reader.read_history()
        assert [(timed.record, timed.offset) for timed in history] == [(Hello(term=1), 0), (Hello(term=2), 3)]
        assert all(written_s - 1.0 <= timed.at_s <= time.time() for timed in history)
        assert reader.refused == 2
        assert reader.read_history() == []


def test_a_tail_reads_to_the_end_of_its_topics(config: JobConfig, services: Services) -> None:
    events = config.topic("events")
    with Tail(config, services, (events, config.topic("metrics"))) as tail:
        assert tail.has_read_history(Partition(events))
        write(config, services, "events", encode(Hello(term=1)))
        assert [timed.record for timed in tail.read_to_end()] == [Hello(term=1)]
        assert tail.ends[Partition(events)] == 0
        assert tail.is_caught_up()


def test_a_topic_that_does_not_exist_is_named(services: Services, config: JobConfig) -> None:
    with pytest.raises(ServiceUnavailableError, match=r"say where doll\.none\.x/0 begins and ends"):
        Reader(config, services, "test", (Partition("doll.none.x"),))


def test_many_partitions_of_a_topic_that_does_not_exist_are_named(config: JobConfig, services: Services) -> None:
    with (
        RangeReader(config, services, 1.0) as reader,
        pytest.raises(ServiceUnavailableError, match="where the 3 partitions of nothing-here begin and end"),
    ):
        reader.bounds_of_partitions("nothing-here", range(3))


class WithoutText:
    """As confluent-kafka's message with a header whose key is no UTF-8: the second question ends the process."""

    def __init__(self, *headers: str) -> None:
        self.asked, self.own = 0, list(headers)

    def headers(self) -> Any:
        self.asked += 1
        if self.own:
            return [(name, b"") for name in self.own]
        assert self.asked == 1
        raise SystemError("returned a result with an exception set") from UnicodeDecodeError(
            "utf-8", b"\xff\xfe", 0, 1, "invalid start byte"
        )


def test_headers_that_are_no_text_are_found_and_are_asked_for_once() -> None:
    messages = [WithoutText("a"), WithoutText(), WithoutText(), WithoutText("b"), WithoutText()]
    reason = r"headers: expected keys in UTF-8, got other bytes (b'\xff\xfe')"
    assert unreadable_headers(messages) == {1: reason, 2: reason, 4: reason}
    assert [message.asked for message in messages] == [1] * 5


def test_a_record_whose_headers_are_no_text_is_read_without_them(config: JobConfig, services: Services) -> None:
    """Of a foreign writer; everything that looks at records of the stream reads it, such as a producer that resumes."""
    samples = config.topic("samples")
    # Many of both: Python optimizes a line that has run some times.
    keys = [b"n", b"\xff\xfe"] * 60
    records = [raw_batches.record(b"1", at=at, headers=[(key, b"v")]) for at, key in enumerate(keys)]
    assert raw_batches.send(services.kafka, samples, 0, records) == 0
    with RangeReader(config, services) as reader:
        messages = list(reader.messages(samples, 0, 0, 120))
    assert [list(message.headers) for message in messages] == [[("n", b"v")], []] * 60


def test_a_range_is_read_with_headers_and_ends_at_its_end(config: JobConfig, services: Services) -> None:
    samples = config.topic("samples")
    with Publisher(config, services) as publisher:
        for number in range(4):
            assert publisher.try_send(samples, b"%d" % number, headers=[("n", b"%d" % number)] if number else ())
    with RangeReader(config, services) as reader:
        messages = list(reader.messages(samples, 0, 0, 3))
        assert [(message.offset, message.value, list(message.headers)) for message in messages] == [
            (0, b"0", []), (1, b"1", [("n", b"1")]), (2, b"2", [("n", b"2")]),
        ]  # fmt: skip
        assert list(reader.read(samples, 0, 3, 4)) == [(3, b"3")]
        assert list(reader.read(samples, 0, 4, 4)) == []
        assert reader.bounds(samples, 0) == (0, 4)
        assert list(reader.records(config.topic("updates"), (Hello,))) == []


@pytest.mark.parametrize("sparse", [False, True])
def test_ranges_of_many_partitions_are_read_together(services: Services, job_name: str, sparse: bool) -> None:
    """With compacted and aborted records there are gaps in all of them: each range ends, wherever the log goes on."""
    config = parse(f"job: {job_name}\ntask: {{class: 'a:B'}}\ndata: {{workers: 40}}\n")
    topics.ensure(config, services)
    samples = config.topic("samples")
    with Publisher(config, services) as publisher:
        for number in range(40):
            for _ in range(3 * number):
                publisher.send(samples, b"x", partition=number)
        assert publisher.flush(60.0) == 0
    ranges = [(number, lo, min(lo + 2, 3 * number)) for number in range(40) for lo in (0, 5, 40, 100)]
    with RangeReader(config, services) as reader:
        offsets = list(reader.read_together(samples, ranges, sparse=sparse))
        assert sorted(offsets) == [(number, at) for number, lo, hi in ranges for at in range(lo, hi)]
        assert list(reader.read_together(samples, [(39, 100, 200), (0, 0, 5), (7, 3, 3)], sparse=sparse)) == [
            (39, at) for at in range(100, 117)
        ]
        assert [offset for offset, _ in reader.read(samples, 39, 115, 117)] == [115, 116], "and one by itself again"
