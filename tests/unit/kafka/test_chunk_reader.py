"""ChunkReader on a real broker: everything once and in order, bounded, and nothing is passed over silently."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer, TopicPartition
from doll.config import JobConfig, parse
from doll.errors import ServiceUnavailableError
from doll.kafka import chunk_reader, topics
from doll.kafka.chunk_reader import Chunk, ChunkReader, Delivery, NoRecordBelow, OutOfRange
from doll.kafka.clients import kafka_settings, make_admin, make_consumer
from doll.kafka.reader import Partition
from doll.local.kafka_broker import LocalKafka
from doll.services import Services
from waiting import until

pytestmark = pytest.mark.integration

GROUP = "the-group"


@pytest.fixture
def config(services: Services, job_name: str) -> JobConfig:
    config = parse(f"job: {job_name}\ntask: {{class: 'a:B'}}\ndata: {{workers: 1, max_record_bytes: 2000000}}\n")
    topics.ensure(config, services)
    return config


class Rig:
    """A reader of `samples`/0 whose deliveries the test takes one by one."""

    def __init__(self, config: JobConfig, services: Services, start: int, **bounds: int) -> None:
        self.config, self.services = config, services
        self.partition = Partition(config.topic("samples"), 0)
        self.reader = ChunkReader(
            config, services, self.partition, group=GROUP, start=start, fetch_max_wait_ms=20, **bounds
        )
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
    assert rig.reader.log_end < 0
    rig.write(*[b"x"] * 30)
    until(lambda: rig.reader.log_end == 30, "the end of the log, while nothing is taken")


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
    assert told == NoRecordBelow(9)
    # What is open holds back the end.
    producer.begin_transaction()
    producer.produce(rig.partition.topic, b"d", partition=0)
    assert producer.flush(60) == 0
    with pytest.raises(queue.Empty):
        rig.deliveries.get(timeout=0.5)
    producer.commit_transaction(60)
    assert rig.read(9) == {9: b"d"}


@pytest.mark.parametrize("beyond", [False, True])
def test_an_offset_that_the_log_does_not_hold_is_told_and_reading_goes_on_only_by_seek(
    make_rig: Callable[..., Rig], beyond: bool
) -> None:
    first = make_rig()
    first.write(*[b"%d" % i for i in range(20)])
    first.delete_below(12)
    rig = make_rig(25 if beyond else 4)
    assert rig.take() == OutOfRange(25 if beyond else 4)
    with pytest.raises(queue.Empty):
        rig.deliveries.get(timeout=0.5)
    rig.reader.seek(15)
    assert rig.read(19) == {offset: b"%d" % offset for offset in range(15, 20)}


def test_what_is_durable_is_committed_in_the_groups_name(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.write(*[b"x"] * 30)
    rig.read(29)
    rig.reader.commit(10)
    until(lambda: rig.committed() == 10, "the commit")
    rig.reader.commit(7)  # never back
    rig.reader.commit(20)
    until(lambda: rig.committed() == 20, "the commit")
    rig.reader.commit(30)
    rig.reader.close()
    assert rig.committed() == 30


def test_a_pause_does_not_hold_up_commits(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.write(*[b"x"] * 30)
    rig.read(29)
    rig.reader.pause()
    rig.reader.commit(10)
    until(lambda: rig.committed() == 10, "the commit")
    rig.reader.commit(12)
    until(lambda: rig.committed() == 12, "the commit")


def test_what_the_library_cannot_read_ends_reading(make_rig: Callable[..., Rig]) -> None:
    """It would go on behind it, and the records would pass for offsets that hold none."""
    rig = make_rig()
    for code in (KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError._NOT_IMPLEMENTED):
        with pytest.raises(ServiceUnavailableError, match=r"nothing usable of .*samples/0 at offset 7"):
            rig.reader._handle(KafkaError(code), 7)
    assert rig.reader._handle(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART), 7)


def test_a_failure_of_whoever_takes_is_the_last_delivery(config: JobConfig, services: Services) -> None:
    got: list[Delivery] = []

    def deliver(delivery: Delivery) -> None:
        got.append(delivery)
        if len(got) == 1:
            raise RuntimeError("no room")

    reader = ChunkReader(
        config, services, Partition(config.topic("samples"), 0), group=GROUP, start=0, fetch_max_wait_ms=20
    )
    reader.start(deliver)  # what comes first is the end of the empty log
    until(lambda: len(got) == 2, "the failure")
    assert isinstance(got[1], RuntimeError)
    reader.close()


def test_a_broker_that_hangs_does_not_hold_up_the_end(make_rig: Callable[..., Rig], broker: LocalKafka) -> None:
    rig = make_rig()
    rig.write(b"x")
    rig.read(0)
    rig.reader.commit(1)
    until(lambda: rig.committed() == 1, "the commit")
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        rig.reader.commit(2)
        began_s = time.monotonic()
        rig.reader.close()
        assert time.monotonic() - began_s < 30  # the library's own wait is 60 s and more
    finally:
        os.kill(broker.pid, signal.SIGCONT)


def test_a_reader_is_closed_soon_also_without_kafka(config: JobConfig, nowhere: Services) -> None:
    reader = ChunkReader(
        config, nowhere, Partition(config.topic("samples"), 0), group=GROUP, start=0, fetch_max_wait_ms=20
    )
    reader.start(lambda delivery: None)
    reader.commit(10)
    began_s = time.monotonic()
    reader.close()
    assert time.monotonic() - began_s < 30  # the library's own wait for a coordinator is 45 s
