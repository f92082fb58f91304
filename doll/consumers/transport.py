"""`doll://`: Faust's aiokafka transport with fixed partitions instead of group membership.

Worker n reads partition n, always. A consumer group would stop all workers whenever one joins or leaves, and give a
dead worker's partition away only after Kafka's session timeout; with `assign` a restart takes a second (ADR 0002). The
parameter server tells two processes on one partition apart by the sessions that it gives them.

The app carries `fixed_partitions: {topic: [partition]}`, `start_offsets: {TP: offset}`, `fetch_max_wait_ms: int`,
`on_out_of_range` (see `OutOfRange`), and `fetch_progress: {TP: (delivered, position)}`, which is kept here: the records
below `delivered` have been delivered, and from there to `position` are none (markers of transactions, for instance). A
fetch waits `fetch_max_wait_ms` for `FETCH_MIN_BYTES`: one request of a slow stream brings many records, not one.

Only committed records are read. A position that the log no longer holds is never reset silently: everything below it
has been delivered by then, so the app knows exactly which offsets it will not get.
Private attributes of Faust and aiokafka are used: their versions are pinned exactly (ADR 0002).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from aiokafka.errors import NoOffsetForPartitionError, OffsetOutOfRangeError
from aiokafka.structs import TopicPartition
from faust.transport.drivers import aiokafka as driver
from faust.types import TP

FETCH_MIN_BYTES: Final = 65_536
_RECHECK_S: Final = 1.0  # whether to stop

# Given the partition and the offset that the log does not hold: the offset to continue at; the same offset: try again;
# None: do not continue.
OutOfRange: TypeAlias = Callable[[TP, int], Awaitable[int | None]]


class AssignedThread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]
    """Assigns the app's fixed partitions and starts them at its offsets."""

    _generation = 0

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._fetch_max_wait_ms = self.app.fetch_max_wait_ms  # Faust hard-codes 1500
        consumer._fetch_min_bytes = FETCH_MIN_BYTES
        consumer._isolation_level = "read_committed"  # Faust sets it only where it writes in transactions itself
        consumer._auto_offset_reset = "none"
        return consumer

    async def getmany(self, active_partitions: set[TP] | None, timeout: float) -> Any:
        try:
            return await super().getmany(active_partitions, timeout)
        except NoOffsetForPartitionError:  # assigned and not positioned yet
            return {}
        except OffsetOutOfRangeError as exc:
            for partition, offset in exc.args[0].items():
                await self._out_of_range(TP(*partition), offset)
            return {}

    async def _fetch_records(self, consumer: Any, active_partitions: Any, *args: Any, **options: Any) -> Any:
        records = await super()._fetch_records(consumer, active_partitions, *args, **options)
        subscription = consumer._subscription.subscription
        for tp, fetch_progress in self.app.fetch_progress.items() if subscription is not None else ():
            state = subscription.assignment.state_value(TopicPartition(*tp))
            if state is not None and state.has_valid_position:
                fetched = records.get(TopicPartition(*tp))
                delivered = fetched[-1].offset + 1 if fetched else min(fetch_progress[0], state.position)
                self.app.fetch_progress[tp] = (delivered, state.position)
        return records

    async def _out_of_range(self, tp: TP, offset: int) -> None:
        partition = TopicPartition(*tp)
        consumer = self._ensure_consumer()
        if await self.call_thread(consumer.position, partition) != offset:
            return  # an answer to a fetch from before a seek
        resume_offset = await self.app.on_out_of_range(tp, offset)
        if resume_offset is None or resume_offset == offset:  # the process is about to end, or the broker is not sure
            await asyncio.sleep(_RECHECK_S)
            return
        # Faust would list every offset that it has not seen before it commits one behind them.
        self.consumer._read_offset[tp] = self.consumer._committed_offset[tp] = resume_offset - 1
        consumer.seek(partition, resume_offset)

    async def subscribe(self, topics: Iterable[str]) -> None:
        await self.call_thread(self._assign, sorted(topics))

    async def _assign(self, topics: list[str]) -> None:
        consumer = self._ensure_consumer()
        wanted = self.app.fixed_partitions
        partitions = {TP(topic, partition) for topic in topics for partition in wanted.get(topic, ())}
        if self._generation and partitions == self.assignment():
            return
        self.app.on_rebalance_start()
        if self._generation:
            await self.on_partitions_revoked(self.assignment())
        consumer.assign([TopicPartition(*tp) for tp in partitions])
        self._generation += 1
        self.app.consumer_generation_id = self._generation
        # Not awaited: on_partitions_assigned waits until this subscribe() has returned.
        self._assigned = asyncio.ensure_future(self.on_partitions_assigned(partitions, self._generation))

    async def seek_to_committed(self) -> Mapping[TP, int]:
        """The server's durable watermark is the truth, not Kafka's committed offset, which may lag or expire."""
        consumer = self._ensure_consumer()
        offsets = dict(await self.call_thread(consumer.seek_to_committed))
        for tp, offset in self.app.start_offsets.items():
            partition = TopicPartition(*tp)
            consumer.seek(partition, offset)
            offsets[partition] = offset
        return offsets


class AssignedConsumer(driver.Consumer):  # type: ignore[misc]
    """Reads on as soon as its partition's buffer has room. Faust's own looks again after a second."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._room = asyncio.Event()
        self._room.set()
        super().__init__(*args, **kwargs)

    def on_buffer_full(self, tp: TP) -> None:
        super().on_buffer_full(tp)
        if not self._get_active_partitions():
            self._room.clear()

    def on_buffer_drop(self, tp: TP) -> None:
        super().on_buffer_drop(tp)
        self._room.set()

    async def _wait_next_records(self, timeout: float) -> Any:
        if self._room.is_set():
            return await super()._wait_next_records(timeout)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._room.wait(), _RECHECK_S)
        return {}, set()

    def _new_consumer_thread(self) -> AssignedThread:
        return AssignedThread(self, loop=self.loop, beacon=self.beacon)


class Transport(driver.Transport):  # type: ignore[misc]
    """Registered as `doll` in the entry point group `faust.transports`."""

    Consumer = AssignedConsumer
