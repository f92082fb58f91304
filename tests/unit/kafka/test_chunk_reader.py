"""ChunkReader on a real broker: everything once and in order, bounded, and nothing is passed over silently."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import raw_batches
from bombs import send_bomb
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Producer, TopicPartition
from cut_logs import truncate_log
from doll.config import JobConfig, parse
from doll.kafka import chunk_reader, topics
from doll.kafka.chunk_reader import (
    NOTHING_LEARNED,
    Chunk,
    ChunkReader,
    Delivery,
    Learned,
    NoRecordBelow,
    OutOfRange,
    ReadFrom,
    Truncated,
)
from doll.kafka.clients import kafka_settings, make_admin, make_consumer
from doll.kafka.range_reader import RangeReader
from doll.kafka.reader import Partition
from doll.local.kafka_broker import LocalKafka
from doll.records.refusals import UnreadValue
from doll.services import Services
from owners_topic import OwnersTopic
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.integration]  # starts servers

GROUP = "the-group"


@pytest.fixture
def config(services: Services, job_name: str) -> JobConfig:
    config = parse(
        f"job: {job_name}\ntask: {{class: 'a:B'}}\ndata: {{workers: 1, max_record_bytes: 2000000}}\n",
        ["worker.fetch_max_wait_ms=20"],
    )
    topics.ensure(config, services)
    return config


class Rig:
    """A reader of `samples`/0 whose deliveries the test takes one by one."""

    def __init__(self, config: JobConfig, services: Services, start: int, **bounds: Any) -> None:
        self.config, self.services = config, services
        self.partition = Partition(config.topic("samples"), 0)
        read = ReadFrom(0, start, bounds.pop("learned", NOTHING_LEARNED))
        self.reader = ChunkReader(config, services, self.partition.topic, [read], group=GROUP, **bounds)
        self.deliveries: queue.Queue[Delivery] = queue.Queue()
        self.reader.start(self.deliveries.put)

    def take(self) -> Delivery:
        delivery = self.deliveries.get(timeout=60)
        self.reader.taken()
        return delivery

    def read(self, until_offset: int) -> dict[int, bytes | None]:
        """Records up to the one at `until_offset`; they must rise."""
        records: dict[int, bytes | None] = {}
        while until_offset not in records:
            delivery = self.take()
            if isinstance(delivery, Chunk):
                assert len(delivery.offsets) == len(delivery.values)
                assert [*delivery.offsets] == sorted({*delivery.offsets})
                assert delivery.offsets[0] > max(records, default=-1)
                records |= dict(zip(delivery.offsets, delivery.values, strict=True))
            else:
                assert isinstance(delivery, NoRecordBelow), delivery
        return records

    def take_until(self, kind: type[Any]) -> Any:
        """The next delivery of this kind."""
        while not isinstance(delivery := self.take(), kind):
            pass
        return delivery

    def write(self, *values: bytes | None) -> None:
        producer = Producer(kafka_settings(self.config, self.services, message_max_bytes=10_000_000))
        for value in values:
            producer.produce(self.partition.topic, value, partition=0)
            producer.poll(0)
        assert producer.flush(60) == 0

    def delete_below(self, offset: int) -> None:
        admin = make_admin(self.config, self.services)
        (future,) = admin.delete_records([TopicPartition(*self.partition, offset)]).values()
        future.result(60)

    def committed(self) -> int:
        consumer = make_consumer(self.config, self.services, "test", group_id=GROUP)
        try:
            (partition,) = consumer.committed([TopicPartition(*self.partition)], timeout=60)
            return int(partition.offset)
        finally:
            consumer.close()


@pytest.fixture
def make_rig(config: JobConfig, services: Services) -> Iterator[Callable[..., Rig]]:
    with ExitStack() as stack:

        def make(start: int = 0, **bounds: int) -> Rig:
            rig = Rig(config, services, start, **bounds)
            stack.callback(rig.reader.close)
            return rig

        yield make


def test_each_fetch_says_where_the_log_ends(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    assert rig.reader.log_end(0) < 0
    rig.write(*[b"x"] * 30)
    until(lambda: rig.reader.log_end(0) == 30, "the end of the log, while nothing is taken")


@pytest.mark.parametrize("bound", [1, 100, chunk_reader.MAX_CHUNK_RECORDS + 1])
def test_every_record_comes_once_in_chunks_that_are_bounded_in_records(
    make_rig: Callable[..., Rig], bound: int
) -> None:
    values: list[bytes | None] = [b"%d" % i if i % 7 else None for i in range(5000)]
    make_rig().write(*values)
    rig = make_rig(3, max_chunk_records=bound)
    chunks: list[Chunk] = []
    while not chunks or chunks[-1].offsets[-1] < 4999:
        if isinstance(delivery := rig.take(), Chunk):
            chunks.append(delivery)
    assert [value for chunk in chunks for value in chunk.values] == values[3:]
    assert [offset for chunk in chunks for offset in chunk.offsets] == [*range(3, 5000)]
    assert all(isinstance(chunk.offsets, range) for chunk in chunks)
    assert max(len(chunk.values) for chunk in chunks) == min(bound, chunk_reader.MAX_CHUNK_RECORDS)


@pytest.mark.parametrize("asked", [True, False])
def test_keys_headers_and_timestamps_come_where_they_are_asked_for(make_rig: Callable[..., Rig], asked: bool) -> None:
    rig = make_rig(with_envelopes=asked)
    producer = Producer(kafka_settings(rig.config, rig.services, message_max_bytes=10_000_000))
    topic = rig.partition.topic
    producer.produce(topic, b"v", b"k", partition=0, headers=[("a", b"1"), ("a", None)], timestamp=1_700_000_000_123)
    producer.produce(topic, None, b"gone", partition=0)
    producer.produce(topic, b"x" * 3_000_000, b"long", partition=0)
    assert producer.flush(60) == 0
    no_text = [raw_batches.record(b"w", headers=[(b"a", b"1"), (b"\xff\xfe", b"v")]), raw_batches.record(b"x", at=1)]
    assert raw_batches.send(rig.services.kafka, topic, 0, no_text) == 0
    chunks: list[Chunk] = []
    while not chunks or chunks[-1].offsets[-1] < 4:
        if isinstance(delivery := rig.take(), Exception):
            raise delivery
        if isinstance(delivery, Chunk):
            chunks.append(delivery)
    *_, refused, last = [value for chunk in chunks for value in chunk.values]
    assert isinstance(refused, UnreadValue), "whatever the task reads"
    assert (refused.code, refused.head, refused.num_bytes, last) == ("undecodable", b"w", 1, b"x")
    assert "headers: expected keys in UTF-8" in refused.reason
    envelopes = [envelope for chunk in chunks for envelope in chunk.envelopes]
    if not asked:
        assert envelopes == []
        return
    first, tombstone, too_long, without_text, _ = envelopes
    assert without_text is None
    assert first is not None
    assert (first.key(), first.headers()) == (b"k", [("a", b"1"), ("a", None)])
    kind, stamp_ms = first.timestamp()
    assert (kind, stamp_ms > 1_700_000_000_123) == (TIMESTAMP_LOG_APPEND_TIME, True), "a topic of DOLL's own"
    assert tombstone is not None
    assert tombstone.key() == b"gone"
    assert too_long is None


def test_chunks_of_large_records_are_bounded_in_bytes(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.write(*[b"x" * 900_000] * 40)
    sizes: list[list[int]] = []
    while sum(map(len, sizes)) < 40:
        if isinstance(delivery := rig.take(), Chunk):
            sizes.append([len(value or b"") for value in delivery.values])
    assert {len(chunk) for chunk in sizes[1:]} == {1}
    assert {size for chunk in sizes for size in chunk} == {900_000}


def test_a_reader_that_is_not_answered_or_paused_delivers_nothing_and_loses_nothing(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig()
    rig.write(*[b"%d" % i for i in range(3000)])
    until(lambda: rig.deliveries.qsize() == 2, "two chunks")
    rig.reader.pause()
    first = [rig.take(), rig.take()]
    rig.write(*[b"later"] * 2000)  # the library fetches it meanwhile
    with pytest.raises(queue.Empty):
        rig.deliveries.get(timeout=0.5)
    rig.reader.resume()
    rest = rig.read(4999)
    before = [offset for chunk in first if isinstance(chunk, Chunk) for offset in chunk.offsets]
    assert [*before, *rest] == [*range(5000)]


def test_offsets_without_a_record_are_told_where_the_log_ends(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    producer = Producer(kafka_settings(rig.config, rig.services, **{"transactional.id": rig.config.job}))
    producer.init_transactions(60)

    def transact(values: list[bytes], end: Callable[[float], object]) -> None:
        producer.begin_transaction()
        for value in values:
            producer.produce(rig.partition.topic, value, partition=0)
        assert producer.flush(60) == 0
        end(60)

    transact([b"a", b"b"], producer.commit_transaction)  # offsets 0, 1 and a marker
    transact([b"never"] * 3, producer.abort_transaction)  # 3 to 5 and a marker
    transact([b"c"], producer.commit_transaction)  # 7 and a marker
    assert rig.read(7) == {0: b"a", 1: b"b", 7: b"c"}
    while (told := rig.take_until(NoRecordBelow)).offset < 9:
        pass
    assert told == NoRecordBelow(0, 9)
    # What is open holds back the end.
    producer.begin_transaction()
    producer.produce(rig.partition.topic, b"d", partition=0)
    assert producer.flush(60) == 0
    with pytest.raises(queue.Empty):
        rig.deliveries.get(timeout=0.5)
    assert rig.reader.log_end(0) == 9, "an open transaction that nobody ends is no lag"
    producer.commit_transaction(60)
    assert rig.read(9) == {9: b"d"}
    until(lambda: rig.reader.log_end(0) == 11, "the end behind its marker")


@pytest.mark.parametrize("beyond", [False, True])
def test_an_offset_that_the_log_does_not_hold_is_told_and_reading_goes_on_only_by_seek(
    make_rig: Callable[..., Rig], beyond: bool
) -> None:
    first = make_rig()
    first.write(*[b"%d" % i for i in range(20)])
    first.delete_below(12)
    rig = make_rig(25 if beyond else 4)
    assert rig.take() == OutOfRange(0, 25 if beyond else 4)
    with pytest.raises(queue.Empty):
        rig.deliveries.get(timeout=0.5)
    rig.reader.seek(0, 15)
    assert rig.read(19) == {offset: b"%d" % offset for offset in range(15, 20)}


def test_what_is_durable_is_committed_in_the_groups_name(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.write(*[b"x"] * 30)
    rig.read(29)
    rig.reader.commit(0, 10)
    until(lambda: rig.committed() == 10, "the commit")
    rig.reader.commit(0, 7)  # never back
    rig.reader.commit(0, 20)
    until(lambda: rig.committed() == 20, "the commit")
    rig.reader.commit(0, 30)
    rig.reader.close()
    assert rig.committed() == 30


def test_a_pause_does_not_hold_up_commits(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.write(*[b"x"] * 30)
    rig.read(29)
    rig.reader.pause()
    rig.reader.commit(0, 10)
    until(lambda: rig.committed() == 10, "the commit")
    rig.reader.commit(0, 12)
    until(lambda: rig.committed() == 12, "the commit")


@pytest.mark.parametrize("records", [1, 5, 700])
def test_batches_that_unpack_to_too_much_are_handed_over_unread_and_reading_goes_on(
    make_rig: Callable[..., Rig], records: int
) -> None:
    rig = make_rig()
    rig.write(b"first")
    for _ in range(3):  # one behind the other, and the last ends the log for now
        bomb(rig, "zstd", 140_000_000 // records, records)
    end = 1 + 3 * records
    values = rig.read(end - 1)
    rig.write(b"last")
    values |= rig.read(end)
    assert sorted(values) == [*range(end + 1)]
    assert (values.pop(0), values.pop(end)) == (b"first", b"last")
    for offset, value in values.items():
        first = offset - (offset - 1) % records
        assert isinstance(value, UnreadValue)
        assert (value.code, value.num_bytes, value.head, len(value)) == ("unreadable", 0, b"", 0)
        assert f"offsets {first} to {first + records - 1} cannot be read" in value.reason
        assert "Decompression" in value.reason


def test_reading_may_begin_inside_a_batch_that_cannot_be_read(make_rig: Callable[..., Rig]) -> None:
    make_rig().write(b"first")
    bomb(make_rig(), "zstd", 140_000, 1000)
    rig = make_rig(600)
    rig.write(b"last")
    values = rig.read(1001)
    assert sorted(values) == [*range(600, 1002)]
    assert all(isinstance(values[offset], UnreadValue) for offset in range(600, 1001))
    assert values[1001] == b"last"


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_value_above_the_limit_is_dropped_where_it_is_read(make_rig: Callable[..., Rig], codec: str) -> None:
    rig = make_rig()
    rig.write(b"first")
    bomb(rig, codec, 9_000_000, 1)
    rig.write(b"x" * 2_000_000, b"last")
    values = rig.read(3)
    assert (values[0], len(values[2] or b""), values[3]) == (b"first", 2_000_000, b"last")
    long = values[1]
    assert isinstance(long, UnreadValue)
    assert (long.code, long.num_bytes, long.head, len(long)) == ("too_long", 9_000_000, bytes(65_536), 0)
    assert "record of 9000000 bytes: expected at most 2000000 (data.max_record_bytes)" in long.reason


def test_what_reads_the_topic_by_ranges_goes_on_behind_what_cannot_be_read(
    make_rig: Callable[..., Rig], services: Services
) -> None:
    rig = make_rig()
    rig.write(b"first")
    bomb(rig, "zstd", 145_000, 1000)
    rig.write(b"last")
    with RangeReader(rig.config, services) as reader:
        assert list(reader.read(*rig.partition, 0, 1002)) == [(0, b"first"), (1001, b"last")]
        assert list(reader.read(*rig.partition, 0, 1)) == [(0, b"first")]
        assert "offsets 1 to 1000 cannot be read" in reader.problems[0]


def bomb(rig: Rig, codec: str, size_bytes: int, records: int) -> None:
    send_bomb(rig.config, rig.services, rig.partition, codec=codec, size_bytes=size_bytes, records=records)


def test_a_failure_of_whoever_takes_is_the_last_delivery(config: JobConfig, services: Services) -> None:
    got: list[Delivery] = []

    def deliver(delivery: Delivery) -> None:
        got.append(delivery)
        if len(got) == 1:
            raise RuntimeError("no room")

    producer = Producer(kafka_settings(config, services))
    producer.produce(config.topic("samples"), b"x", partition=0)
    assert producer.flush(60) == 0
    reader = ChunkReader(config, services, config.topic("samples"), [ReadFrom(0, 0)], group=GROUP)
    reader.start(deliver)
    until(lambda: len(got) == 2, "the failure")
    assert isinstance(got[1], RuntimeError)
    reader.close()


def test_a_broker_that_hangs_does_not_hold_up_the_end(make_rig: Callable[..., Rig], broker: LocalKafka) -> None:
    rig = make_rig()
    rig.write(b"x")
    rig.read(0)
    rig.reader.commit(0, 1)
    until(lambda: rig.committed() == 1, "the commit")
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        rig.reader.commit(0, 2)
        began_s = time.monotonic()
        rig.reader.close()
        assert time.monotonic() - began_s < 30  # the library's own wait is 60 s and more
    finally:
        os.kill(broker.pid, signal.SIGCONT)


def test_a_reader_is_closed_soon_also_without_kafka(config: JobConfig, nowhere: Services) -> None:
    reader = ChunkReader(config, nowhere, config.topic("samples"), [ReadFrom(0, 0)], group=GROUP)
    reader.start(lambda delivery: None)
    reader.commit(0, 10)
    began_s = time.monotonic()
    reader.close()
    assert time.monotonic() - began_s < 30  # the library's own wait for a coordinator is 45 s


def test_a_log_that_lost_its_end_is_told_as_truncated(tmp_path: Path) -> None:
    config = parse("job: cut\ntask: {class: 'a:B'}\ndata: {workers: 1}\n")
    with LocalKafka(tmp_path) as kafka:
        services = Services(kafka.address, "")
        topics.ensure(config, services)
        rig = Rig(config, services, 0)
        try:
            for number in range(30):  # a batch of the log each
                rig.write(b"%d" % number)
            rig.read(29)
            kafka.kill()
            truncate_log(tmp_path, rig.partition, share=2 / 3)
            kafka.restart()
            truncated = rig.take_until(Truncated)
            assert truncated.offset == 30
            assert truncated.reason.startswith("Partition log truncation detected at offset 30 (leader epoch ")
        finally:
            rig.reader.close()


def test_a_log_that_was_truncated_and_refilled_while_nobody_read_it_is_told_by_its_leader_epochs(
    tmp_path: Path,
) -> None:
    config = parse("job: cut\ntask: {class: 'a:B'}\ndata: {workers: 1}\n")
    with ExitStack() as stack:
        kafka = stack.enter_context(LocalKafka(tmp_path))
        services = Services(kafka.address, "")
        topics.ensure(config, services)

        def make(start: int, learned: Learned) -> Rig:
            rig = Rig(config, services, start, learned=learned)
            stack.callback(rig.reader.close)
            return rig

        rig = make(0, Learned(0, -1))
        for number in range(30):  # a batch of the log each
            rig.write(b"%d" % number)
        epoch = rig.take_until(Chunk).leader_epoch
        assert epoch >= 0
        rig.reader.close()
        kafka.kill()
        kafka.restart()
        rig = make(30, Learned(30, epoch))  # a new leader whose log is whole
        rig.write(b"30")
        assert rig.take_until(Chunk).leader_epoch > epoch
        rig.reader.close()

        kafka.kill()
        truncate_log(tmp_path, rig.partition, share=2 / 3)
        kafka.restart()
        rig.write(*[b"other"] * 30)
        truncated = make(30, Learned(30, epoch)).take_until(Truncated)
        assert truncated.offset == 30
        assert all(part in truncated.reason for part in (f"leader epoch {epoch}", "broker end offset is 2"))
        # What is durable is there, and what was learned behind it is not.
        truncated = make(15, Learned(30, epoch)).take_until(Truncated)
        assert truncated.offset == 30
        assert f"up to offset 29, had {epoch} at most" in truncated.reason
        # The new records lie behind what was learned; nothing is known of it.
        assert make(15, Learned(20, epoch)).read(29)[15] == b"15"
        assert make(30, Learned(30, -1)).read(30)[30] == b"other"


# --- several partitions -----------------------------------------------------------------------------------------------


class Readings:
    """A reader of three partitions; what it delivers of each."""

    def __init__(self, config: JobConfig, services: Services, *starts: int) -> None:
        self.config, self.services, self.topic = config, services, config.topic("samples")
        reads = [ReadFrom(partition, start) for partition, start in enumerate(starts)]
        self.reader = ChunkReader(config, services, self.topic, reads, group=GROUP)
        self.deliveries: queue.Queue[Delivery] = queue.Queue()
        self.records: dict[int, list[tuple[int, bytes | None]]] = {partition: [] for partition in range(len(starts))}
        self.others: list[OutOfRange | Truncated] = []

    def write(self, partition: int, *values: bytes) -> None:
        producer = Producer(kafka_settings(self.config, self.services))
        for value in values:
            producer.produce(self.topic, value, partition=partition)
        assert producer.flush(60) == 0

    def read_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            delivery = self.deliveries.get(timeout=60)
            self.reader.taken()
            if isinstance(delivery, Chunk):
                self.records[delivery.partition] += zip(delivery.offsets, delivery.values, strict=True)
            elif isinstance(delivery, OutOfRange | Truncated):
                self.others.append(delivery)
            else:
                assert isinstance(delivery, NoRecordBelow), delivery


@pytest.fixture
def readings(services: Services, job_name: str) -> Iterator[Readings]:
    """From offsets 0, 2 and 9 on; the third partition has no offset 9."""
    config = parse(
        f"job: {job_name}\ntask: {{class: 'a:B'}}\ndata: {{workers: 1, partitions: 3, max_record_bytes: 2000000}}\n",
        ["worker.fetch_max_wait_ms=20"],
    )
    topics.ensure(config, services)
    made = Readings(config, services, 0, 2, 9)
    for partition, count in ((0, 600), (1, 5), (2, 4)):
        made.write(partition, *(b"%d/%d" % (partition, number) for number in range(count)))
    made.reader.start(made.deliveries.put)
    yield made
    made.reader.close()


def test_each_partition_comes_whole_and_in_order_and_one_that_is_out_of_range_stops_no_other(
    readings: Readings,
) -> None:
    records = readings.records
    readings.read_until(lambda: len(records[0]) == 600 and len(records[1]) == 3 and bool(readings.others))
    for partition, first, end in ((0, 0, 600), (1, 2, 5)):
        assert records[partition] == [(number, b"%d/%d" % (partition, number)) for number in range(first, end)]
    assert readings.others == [OutOfRange(2, 9)]
    readings.write(0, b"more")
    readings.reader.seek(2, 1)
    readings.read_until(lambda: len(records[0]) == 601 and len(records[2]) == 3)
    assert records[2] == [(number, b"2/%d" % number) for number in range(1, 4)]
    assert records[0][-1] == (600, b"more"), "nothing comes twice where another partition goes on elsewhere"
    until(lambda: [readings.reader.log_end(partition) for partition in range(3)] == [601, 5, 4], "the ends of the logs")


def test_each_partition_is_committed_by_itself(readings: Readings) -> None:
    readings.read_until(lambda: len(readings.records[0]) == 600 and len(readings.records[1]) == 3)
    readings.reader.commit(0, 500)
    readings.reader.commit(1, 4)
    readings.reader.close()
    consumer = make_consumer(readings.config, readings.services, "test", group_id=GROUP)
    try:
        wanted = [TopicPartition(readings.topic, partition) for partition in range(3)]
        assert [item.offset for item in consumer.committed(wanted, timeout=60)][:2] == [500, 4]
        assert consumer.committed(wanted, timeout=60)[2].offset < 0, "of the third nothing is durable"
    finally:
        consumer.close()


def test_a_batch_that_cannot_be_read_in_one_partition_stops_no_other(readings: Readings) -> None:
    readings.read_until(lambda: len(readings.records[0]) == 600 and len(readings.records[1]) == 3)
    send_bomb(readings.config, readings.services, Partition(readings.topic, 1), codec="zstd", size_bytes=90_000_000)
    readings.write(1, b"behind")
    readings.write(0, b"more")
    readings.read_until(lambda: len(readings.records[0]) == 601 and readings.records[1][-1][1] == b"behind")
    assert [offset for offset, _ in readings.records[1]] == [2, 3, 4, 5, 6]
    assert [isinstance(value, UnreadValue) for _, value in readings.records[1]] == [False, False, False, True, False]


def test_what_is_read_changes_and_deliveries_say_what_they_are_for(readings: Readings) -> None:
    reader, records = readings.reader, readings.records
    readings.read_until(lambda: len(records[0]) == 600 and len(records[1]) == 3 and bool(readings.others))
    reader.change([0, 2], [ReadFrom(0, 590, reading=1)])
    chunks: list[Chunk] = []
    while sum(len(chunk.offsets) for chunk in chunks) < 10:
        delivery = readings.deliveries.get(timeout=60)
        reader.taken()
        if isinstance(delivery, Chunk):
            chunks.append(delivery)
    assert [(chunk.partition, chunk.reading) for chunk in chunks] == [(0, 1)] * len(chunks)
    assert chunks[0].offsets[0] == 590
    reader.seek(2, 1)  # an answer to what is read no more
    reader.pause()
    reader.change([0, 1], [ReadFrom(2, 1, reading=2)])
    reader.resume()
    readings.write(2, b"last")
    readings.read_until(lambda: [value for _, value in records[2]] == [b"2/1", b"2/2", b"2/3", b"last"])
    until(lambda: reader.log_end(2) == 5, "the end of its log")


def test_a_partition_that_was_added_since_is_read_at_once(make_rig: Callable[..., Rig]) -> None:
    """The library asks again for a topic of which it does not know the partition."""
    rig = make_rig()
    rig.write(b"x")
    rig.read(0)
    topic = OwnersTopic(rig.services.kafka, rig.partition.topic)
    topic.add_partitions(3)
    topic.fill(2, [b"a", b"b"])
    rig.reader.change((), [ReadFrom(2, 0)])
    chunk = rig.take_until(Chunk)
    assert (chunk.partition, chunk.values[0]) == (2, b"a")


def test_an_end_that_the_last_chunk_says_is_not_told_of(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    for number in range(20):
        rig.write(b"%d" % number)
        assert isinstance(rig.take(), Chunk)
    with pytest.raises(queue.Empty):
        rig.deliveries.get(timeout=0.5)
