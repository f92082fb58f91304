"""What a worker has read and not decoded. Bounded by back-pressure, in batches and in bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from doll.config import JobConfig
from doll.consumers.intake.batching import Batcher, RawBatch
from doll.kafka.unread import UnreadValue

Value: TypeAlias = bytes | None

MAX_WAITING_BYTES: Final = 64 << 20
_MORE_BATCHES: Final = 1024  # beyond a full buffer: more than a chunk has without long holes


def stream_buffer_records(config: JobConfig) -> int:
    """Records that may wait between Kafka and the batches."""
    return config.worker.stream_buffer_records or max(64, 4096 // config.data.samples_per_record)


def buffer_capacity(config: JobConfig) -> int:
    """Batches that may wait to be decoded before reading pauses."""
    return max(2, stream_buffer_records(config) // config.data.records_per_batch)


class BatchBuffer:
    """Cuts records into batches and keeps these until they are asked for. One event loop owns it.

    Feeding never waits for a batch to be taken: the reader pauses when the buffer is full, until it is half empty.
    """

    def __init__(self, batcher: Batcher[Value], capacity: int, max_bytes: int = MAX_WAITING_BYTES) -> None:
        """
        Args:
            capacity: batches from which on reading pauses.
            max_bytes: bytes in whole batches from which on reading pauses, too.
        """
        self.batcher = batcher
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._raw_batches: deque[tuple[RawBatch[Value], int]] = deque()  # with the bytes of its values
        self._waiting_bytes = 0
        self._cuts: deque[Iterator[RawBatch[Value]]] = deque()  # what is fed and not cut yet
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        """Batches that are read and not taken."""
        return len(self._raw_batches)

    @property
    def is_half_empty(self) -> bool:
        """Reading should go on."""
        return (
            not self._cuts
            and len(self._raw_batches) <= self._capacity // 2
            and self._waiting_bytes <= self._max_bytes // 2
        )

    @property
    def _is_full(self) -> bool:
        return len(self._raw_batches) >= self._capacity or self._waiting_bytes >= self._max_bytes

    def feed(self, offsets: Sequence[int], values: Sequence[Value], leader_epoch: int = -1) -> bool:
        """Take the next records of the log, as `Batcher.feed`; whether the buffer is full.

        They are cut as far as there is room: records far apart make many empty batches.
        """
        return self._cut(self.batcher.feed(offsets, values, leader_epoch))

    def skip_to(self, offset: int) -> None:
        """No record below `offset` is to come."""
        self._cut(self.batcher.skip_to(offset))

    def _cut(self, *more: Iterator[RawBatch[Value]]) -> bool:
        self._cuts += more
        while self._cuts and len(self._raw_batches) < self._capacity + _MORE_BATCHES:
            raw = next(self._cuts[0], None)
            if raw is None:
                self._cuts.popleft()
            else:
                self._put(raw)
        return self._is_full

    async def wait(self) -> None:
        """Return when there is a batch."""
        while not self._raw_batches:
            self._filled.clear()
            await self._filled.wait()

    def take(self) -> RawBatch[Value]:
        """The next batch.

        Raises:
            IndexError: the buffer is empty.
        """
        raw, num_bytes = self._raw_batches.popleft()
        self._waiting_bytes -= num_bytes
        self._cut()
        return raw

    def _put(self, raw: RawBatch[Value]) -> None:
        held = list(filter(None, raw.values))
        num_bytes = sum(map(len, held))
        if len(held) < len(raw.values):
            num_bytes += sum(len(value.head) for value in raw.values if isinstance(value, UnreadValue))
        self._raw_batches.append((raw, num_bytes))
        self._waiting_bytes += num_bytes
        self._filled.set()
