"""`doll://`: a Faust transport that reads one partition in chunks, with fixed partitions instead of group membership.

Worker n reads partition n, always. A consumer group would stop all workers whenever one joins or leaves, and give a
dead worker's partition away only after Kafka's session timeout; with `assign` a restart takes a second (ADR 0002). The
parameter server tells two processes on one partition apart by the sessions that it gives them.

Records come from `doll.kafka.chunk_reader`. One Faust event carries one `Chunk` as its value, so what Faust does per
event costs next to nothing per record (ADR 0027). Faust itself sends nothing and commits nothing: the app tells the
reader which offset is durable.

The app carries `reader` and `partition` (what it reads), `on_out_of_range` and `on_truncated` (see `OutOfRangeHandler`
and `TruncatedHandler`), and `fetch_progress: (delivered, position)`, which is kept here: the records below `delivered`
have been delivered, and from there to `position` are none (markers of transactions, for instance).

A position that the log no longer holds is never reset silently: everything below it has been delivered by then, so the
app knows exactly which offsets it will not get.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, NoReturn, TypeAlias

from faust.transport import base
from faust.types import TP, ConsumerMessage

from doll.kafka.chunk_reader import Chunk, Delivery, NoRecordBelow, OutOfRange, Truncated

_ASK_AGAIN_S: Final = 1.0  # the broker is not sure whether it holds an offset

# Given the partition and the offset that the log does not hold: the offset to continue at; the same offset: try again;
# None: do not continue.
OutOfRangeHandler: TypeAlias = Callable[[TP, int], Awaitable[int | None]]
# Given an offset below which the log has lost records that were read, and what shows it: it ends the process.
TruncatedHandler: TypeAlias = Callable[[int, str], None]


class ChunkConsumer(base.Consumer):  # type: ignore[misc]
    """Faust's consumer: assigns the app's partition and passes the reader's chunks to the conductor as messages."""

    _generation = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._assigned: set[TP] = set()
        self._deliveries: deque[Delivery] = deque()
        self._delivered = asyncio.Event()
        self._is_reading = False

    # --- life cycle -------------------------------------------------------------------------------------------------

    async def subscribe(self, topics: Iterable[str]) -> None:
        partitions = {self.app.partition} & {TP(topic, self.app.partition.partition) for topic in topics}
        if self._generation and partitions == self._assigned:
            return
        self.app.on_rebalance_start()
        self._assigned = partitions
        self._generation += 1
        self.app.consumer_generation_id = self._generation
        # Not awaited: on_partitions_assigned waits until this subscribe() has returned.
        self._assigning = asyncio.ensure_future(self.on_partitions_assigned(partitions, self._generation))

    async def seek_to_committed(self) -> Mapping[TP, int]:
        """Start reading where the reader says: the server's durable watermark is the truth.

        Kafka's committed offset may lag or expire.
        """
        if not self._is_reading:
            self._is_reading = True
            loop = asyncio.get_running_loop()

            def deliver(delivery: Delivery) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._put, delivery)

            self.app.reader.start(deliver)
        return {self.app.partition: self.app.fetch_progress[0]}

    async def on_stop(self) -> None:
        await super().on_stop()
        await asyncio.get_running_loop().run_in_executor(None, self.app.reader.close)

    def _put(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        self._delivered.set()

    # --- records ----------------------------------------------------------------------------------------------------

    async def _drain_messages(self, fetcher: Any) -> None:
        """Faust's fetcher runs this: pass on what comes, until the app stops."""
        try:
            while not (self.should_stop or fetcher.should_stop):
                while not self._deliveries:
                    self._delivered.clear()
                    await self._delivered.wait()
                await self._pass_on(self._deliveries.popleft())
                self.app.reader.taken()
        except asyncio.CancelledError:
            if not self.app.should_stop:
                raise

    async def _pass_on(self, delivery: Delivery) -> None:
        """
        Raises:
            Exception: the reader cannot go on.
        """
        match delivery:
            case Chunk(offsets):
                await self.wait_first(
                    self.callback(self._to_message(self.app.partition, delivery)), self.suspend_flow.wait()
                )
                next_offset = offsets[-1] + 1
                self.app.fetch_progress = (next_offset, next_offset)
            case NoRecordBelow(offset):
                self.app.fetch_progress = (self.app.fetch_progress[0], offset)
            case OutOfRange(offset):
                await self._out_of_range(offset)
            case Truncated(offset, reason):
                self.app.on_truncated(offset, reason)
            case Exception():
                raise delivery

    async def _out_of_range(self, offset: int) -> None:
        resume_offset = await self.app.on_out_of_range(self.app.partition, offset)
        if resume_offset is None:  # the process is about to end
            return
        if resume_offset == offset:
            await asyncio.sleep(_ASK_AGAIN_S)
        self.app.fetch_progress = (resume_offset, resume_offset)
        self.app.reader.seek(resume_offset)

    def _to_message(self, tp: TP, record: Chunk) -> ConsumerMessage:
        return ConsumerMessage(
            tp.topic, tp.partition, record.offsets[0], 0.0, 0, None, None, record, None, 0, 0, tp,
            generation_id=self._generation,
        )  # fmt: skip

    # --- what Faust asks for, and this transport does otherwise or not at all ---------------------------------------

    async def commit(self, topics: Any = None, start_new_transaction: bool = True) -> bool:
        """Nothing: the reader commits what the app says is durable."""
        return False

    def on_buffer_full(self, tp: TP) -> None:
        """Nothing: the reader is a few chunks ahead at most."""

    def on_buffer_drop(self, tp: TP) -> None:
        """See `on_buffer_full`."""

    def assignment(self) -> set[TP]:
        return self._assigned

    def highwater(self, tp: TP) -> int:
        return int(self.app.fetch_progress[1])

    async def position(self, tp: TP) -> int | None:
        return int(self.app.fetch_progress[1])

    def topic_partitions(self, topic: str) -> int | None:
        return None

    def _new_topicpartition(self, topic: str, partition: int) -> TP:
        return TP(topic, partition)

    def _unused(self, *_: Any, **__: Any) -> NoReturn:
        """Operations that Faust's consumer must have, for tables, `seek` and topics of its own: no DOLL app has these.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("the doll:// transport reads one partition in order: it has no tables and no seek")

    _commit = _getmany = _seek = seek_wait = create_topic = earliest_offsets = highwaters = key_partition = _unused


class Transport(base.Transport):  # type: ignore[misc]
    """Registered as `doll` in the entry point group `faust.transports`.

    The producer is Faust's base class: its service starts, and it can send nothing.
    """

    Consumer = ChunkConsumer
    default_port = 9092
    driver_version = "doll"
