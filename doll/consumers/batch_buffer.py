"""What a worker has read and not decoded, and what it has decoded and not acknowledged. Bounded by back-pressure."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from doll.config import JobConfig
from doll.consumers.batching import Batcher, RawBatch

M = TypeVar("M")


def stream_buffer_records(config: JobConfig) -> int:
    """Records that may wait between Kafka and the batches."""
    return config.worker.stream_buffer_records or max(64, 4096 // config.data.samples_per_record)


def buffer_capacity(config: JobConfig) -> int:
    """Batches that may wait to be decoded before reading pauses."""
    return max(2, stream_buffer_records(config) // config.data.records_per_batch)


class BatchBuffer(Generic[M]):
    """Cuts messages into batches and keeps these until they are asked for. One event loop owns it.

    Reading never waits for a batch to be taken: what waits here is one batch, what waits in Faust's own queue would be
    one event per record. Instead the reader pauses when the buffer is full, until it is half empty.
    """

    def __init__(self, batcher: Batcher[M], capacity: int) -> None:
        """
        Args:
            capacity: batches from which on reading pauses.
        """
        self.batcher = batcher
        self._capacity = capacity
        self._raw_batches: deque[RawBatch[M]] = deque()
        self._filled = asyncio.Event()
        self._unacknowledged: deque[tuple[int, list[M]]] = deque()

    def __len__(self) -> int:
        """Batches that are read and not taken."""
        return len(self._raw_batches)

    @property
    def is_half_empty(self) -> bool:
        """Reading should go on."""
        return len(self._raw_batches) <= self._capacity // 2

    def feed(self, offset: int, message: M) -> bool:
        """Take the message at `offset`; whether the buffer is full."""
        for raw in self.batcher.feed(offset, message):
            self._put(raw)
        return len(self._raw_batches) >= self._capacity

    def skip_to(self, offset: int) -> None:
        """No message below `offset` is to come."""
        for raw in self.batcher.skip_to(offset):
            self._put(raw)

    async def wait(self) -> None:
        """Return when there is a batch."""
        while not self._raw_batches:
            self._filled.clear()
            await self._filled.wait()

    def take(self) -> RawBatch[M]:
        """The next batch.

        Raises:
            IndexError: there is none.
        """
        return self._raw_batches.popleft()

    def retain(self, number: int, messages: list[M]) -> None:
        """Keep the messages of batch `number` until `release`. Batches come in order."""
        self._unacknowledged.append((number, messages))

    def release(self, until: int) -> list[M]:
        """The messages of all batches below `until`, in order; they are no longer kept."""
        released: list[M] = []
        while self._unacknowledged and self._unacknowledged[0][0] < until:
            released += self._unacknowledged.popleft()[1]
        return released

    def _put(self, raw: RawBatch[M]) -> None:
        self._raw_batches.append(raw)
        self._filled.set()
