"""What waits between the stream and the gradient: in order, bounded, and kept until it is durable."""

from __future__ import annotations

import asyncio

import pytest
from doll.config import parse
from doll.consumers.batch_buffer import BatchBuffer, buffer_capacity, stream_buffer_records
from doll.consumers.batching import Batcher

JOB = 'job: unit\ntask: {class: "doll.tasks.synthetic:Gaussian"}\ndata: {workers: 2, batch_size: 4}\n'


def buffer(capacity: int = 3) -> BatchBuffer[str]:
    return BatchBuffer(Batcher(origin=10, records_per_batch=2, next_batch=1), capacity)


def feed(made: BatchBuffer[str], until: int) -> list[bool]:
    return [made.feed(offset, f"message {offset}") for offset in range(made.batcher.next_offset, until)]


def test_messages_come_out_as_batches_in_order() -> None:
    made = buffer()
    feed(made, 17)
    assert len(made) == 2
    assert [(raw.number, [message for _, message in raw.records]) for raw in (made.take(), made.take())] == [
        (1, ["message 12", "message 13"]),
        (2, ["message 14", "message 15"]),
    ]
    with pytest.raises(IndexError):
        made.take()


def test_the_reader_learns_when_to_pause_and_when_to_resume() -> None:
    made = buffer(capacity=3)
    assert feed(made, 20) == [False] * 5 + [True] * 3
    made.take()
    assert not made.is_half_empty
    made.take(), made.take()
    assert made.is_half_empty


async def test_whoever_waits_goes_on_with_the_next_batch_also_an_empty_one() -> None:
    made = buffer()
    waiter = asyncio.ensure_future(made.wait())
    await asyncio.sleep(0)
    assert not waiter.done()
    made.skip_to(14)  # offsets 12 and 13 hold no record
    await waiter
    assert (made.take().number, made.batcher.next_offset) == (1, 14)
    waiter = asyncio.ensure_future(made.wait())
    await asyncio.sleep(0)
    assert not waiter.done()
    feed(made, 16)
    await waiter


def test_messages_are_kept_until_their_batch_is_durable() -> None:
    made = buffer()
    made.retain(1, ["a", "b"])
    made.retain(2, [])
    made.retain(3, ["c"])
    assert made.release(1) == []
    assert made.release(3) == ["a", "b"]
    assert made.release(3) == []
    assert made.release(9) == ["c"]


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
