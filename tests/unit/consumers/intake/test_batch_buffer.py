"""What waits between the stream and the gradient: in order, bounded, and kept until it is durable."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from doll.config import parse
from doll.consumers.intake.batching import (
    BatchBuffer,
    PartitionBatcher,
    Value,
    buffer_capacity,
    stream_buffer_records,
)

JOB = 'job: unit\ntask: {class: "examples.synthetic.task:Gaussian"}\ndata: {workers: 2, batch_size: 4}\n'


class Buffer(BatchBuffer):
    """A buffer with the batchers of its partitions."""

    def __init__(self, *batchers: PartitionBatcher[Value], capacity: int = 3, max_bytes: int = 1000) -> None:
        super().__init__(capacity, max_bytes)
        self.batchers = {batcher._partition: batcher for batcher in batchers or [batcher_of(10, next_batch=1, size=2)]}

    def feed(self, partition: int, offsets: Sequence[int], values: Sequence[Value]) -> bool:
        return self.cut(partition, self.batchers[partition].feed(offsets, values))

    def skip_to(self, partition: int, offset: int) -> bool:
        return self.cut(partition, self.batchers[partition].skip_to(offset))


def batcher_of(origin: int, next_batch: int = 0, size: int = 1, partition: int = 0) -> PartitionBatcher[Value]:
    return PartitionBatcher(origin=origin, records_per_batch=size, next_batch=next_batch, partition=partition)


def feed(made: Buffer, until: int) -> list[bool]:
    """One record a chunk; whether the buffer was full behind each."""
    return [made.feed(0, [offset], [b"%d" % offset]) for offset in range(made.batchers[0].next_offset, until)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_records_come_out_as_batches_in_order(chunk: int) -> None:
    made = Buffer()
    for first in range(12, 17, chunk):
        offsets = range(first, min(first + chunk, 17))
        made.feed(0, offsets, [b"%d" % offset for offset in offsets])
    assert len(made) == 2
    assert [(raw.number, raw.offsets, raw.values) for raw in (made.take(), made.take())] == [
        (1, range(12, 14), [b"12", b"13"]),
        (2, range(14, 16), [b"14", b"15"]),
    ]
    with pytest.raises(IndexError):
        made.take()


def test_the_reader_learns_when_to_pause_and_when_to_resume() -> None:
    made = Buffer(capacity=3)
    assert feed(made, 20) == [False] * 5 + [True] * 3
    made.take()
    assert not made.is_half_empty
    made.take(), made.take()
    assert made.is_half_empty


def test_a_batch_without_a_record_comes_out_too() -> None:
    made = Buffer()
    assert not made
    made.skip_to(0, 14)  # offsets 12 and 13 hold no record
    assert (made.take().number, made.batchers[0].next_offset) == (1, 14)
    assert not made
    feed(made, 16)
    assert len(made) == 1


def test_bytes_in_whole_batches_count_too() -> None:
    made = Buffer(capacity=100, max_bytes=40)
    full = [made.feed(0, [offset], [value]) for offset, value in zip(range(12, 18), [b"x" * 10] * 6, strict=True)]
    assert full == [False, False, False, True, True, True]  # 20 bytes each two records
    made.take()
    assert not made.is_half_empty  # 40 of 60 are left
    made.take()
    assert made.is_half_empty


def test_a_batch_larger_than_the_bound_still_comes_out_and_reading_goes_on() -> None:
    made = Buffer(capacity=100, max_bytes=40)
    assert made.feed(0, range(12, 14), [b"x" * 100, None])
    assert not made.is_half_empty
    assert made.take().values == [b"x" * 100, None]
    assert made.is_half_empty


@pytest.mark.parametrize(
    ("overrides", "records", "batches"),
    [
        ((), 4096, 1024),
        (("data.batch_size=8192",), 4096, 2),
        (("data.samples_per_record=4",), 1024, 1024),
        (("worker.stream_buffer_records=100",), 100, 25),
    ],
)
def test_how_much_may_wait_follows_the_batch(overrides: tuple[str, ...], records: int, batches: int) -> None:
    config = parse(JOB, overrides)
    assert (stream_buffer_records(config), buffer_capacity(config)) == (records, batches)


def test_records_far_apart_are_cut_as_there_is_room() -> None:
    made = Buffer(batcher_of(0), capacity=64, max_bytes=1 << 20)
    offsets = range(0, 200 * 500, 200)  # 199 empty batches before each
    assert made.feed(0, offsets, [b"x"] * 500)
    assert len(made) == 64 + 1024
    made.skip_to(0, 200_000)
    numbers: list[int] = []
    while len(made):
        assert len(made) <= 64 + 1024
        assert not made.is_half_empty or made.batchers[0].next_offset == 200_000
        raw = made.take()
        numbers += range(raw.number, raw.number + raw.count)
    assert numbers == [*range(200_000)]


def test_a_partition_that_is_removed_leaves_nothing_and_others_in_their_order() -> None:
    made = Buffer(batcher_of(0, partition=3), batcher_of(0, partition=5), capacity=64)
    made.feed(3, range(2), [b"aa", b"b"])
    made.feed(5, range(2), [b"c", b"d"])
    made.feed(3, [5_000], [b"e"])  # many batches without a record: not all of them are cut yet
    made.remove(3)
    made.batchers[4] = batcher_of(0, next_batch=7, partition=4)
    made.feed(4, [7], [b"f"])
    taken = [made.take() for _ in range(len(made))]
    assert [(raw.partition, raw.number, raw.values) for raw in taken] == [
        (5, 0, [b"c"]),
        (5, 1, [b"d"]),
        (4, 7, [b"f"]),
    ]
    assert made.is_half_empty
