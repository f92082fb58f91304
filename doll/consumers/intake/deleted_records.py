"""The reaction to `samples` records that were deleted before this worker read them: continue after them, or end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from doll.config import JobConfig
from doll.consumers.channels.kafka_channel import WorkerChannel
from doll.consumers.intake.batching import PartitionBatcher
from doll.consumers.lifecycle.departure import ProcessExit
from doll.consumers.protocol.worker_core import WorkerCore
from doll.errors import ConfigError, DataLossError, ServiceUnavailableError
from doll.kafka.samples_topic import TRUNCATED_ADVICE, lost_records, short_log_message, truncated_message
from doll.process.metric_names import LOST_FROM, LOST_PARTITION, LOST_UNTIL
from doll.telemetry import get_logger

log = get_logger(__name__)

_NEWER_START_TIMEOUT_S: Final = 10.0  # for the server to confirm that deleted records are in the durable model
_RECHECK_S: Final = 0.1


class DeletedRecords:
    """The choice of the offset at which a worker continues to read if the log lacks the next record of a partition."""

    def __init__(
        self,
        config: JobConfig,
        core: WorkerCore,
        channel: WorkerChannel,
        process_exit: ProcessExit,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_data_loss = config.data.on_data_loss
        self._records_per_batch = config.data.records_per_batch
        self._topic = config.topic("samples")
        self._core = core
        self._channel = channel
        self._exit = process_exit
        self._sleep = sleep
        self._clock = clock

    async def resume_offset(self, partition: int, offset: int, batcher: PartitionBatcher[Any]) -> int | None:
        """Return the offset at which to continue if the log lacks `offset`, the next offset to read. If the result is
        `offset`, ask Kafka again. If it is None, the process ends. Lost records are marked in `batcher`."""
        loop = asyncio.get_running_loop()
        try:
            low, high = await loop.run_in_executor(None, self._channel.watermarks, self._topic, partition)
        except ServiceUnavailableError:
            return offset  # the client has logged that Kafka is unreachable
        if offset > high:
            # The leader has no such offset. If it does not know yet that an offset is committed, it returns no error.
            self._refuse(short_log_message(self._topic, partition, offset, high))
            return None
        if offset >= low or await self._has_newer_start(partition, offset):
            return offset
        reason = lost_records(self._topic, partition, offset, low)
        if self._on_data_loss == "stop":
            lost = {LOST_PARTITION: partition, LOST_FROM: offset, LOST_UNTIL: low}
            self._channel.report({name: float(value) for name, value in lost.items()})
            self._exit.request(DataLossError.exit_code, reason)
            return None
        log.error("records_lost", reason=reason, action="going on without them (data.on_data_loss: skip)")
        batcher.mark_lost(offset, low)
        return low

    def refuse_truncated(self, partition: int, offset: int, reason: str) -> None:
        """End the process, because the log has lost records below `offset` that were read. The log may be as long as
        before."""
        self._refuse(truncated_message(self._topic, partition, offset, reason))

    def _refuse(self, message: str) -> None:
        self._exit.request(ConfigError.exit_code, f"{message}; {TRUNCATED_ADVICE}")

    async def _has_newer_start(self, partition: int, offset: int) -> bool:
        """Return whether the durable model now contains `offset`, which an earlier process of this worker has learned.

        If it does, this process ends, and the next process starts after `offset`. This method asks the server and gives
        it time to answer. Without this question, records that retention deleted after they were durable would count as
        lost.
        """
        self._channel.send(self._core.join())
        deadline_s = self._clock() + _NEWER_START_TIMEOUT_S
        while not self._exit.is_requested and self._clock() < deadline_s:
            served = self._core.served[partition]
            if served.bounds(self._records_per_batch).lo(served.reported_durable) > offset:
                self._exit.request(
                    1, f"the durable model holds offset {offset} by now: reading again from where it ends"
                )
            await self._sleep(_RECHECK_S)
        return self._exit.is_requested
