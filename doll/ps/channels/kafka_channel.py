"""The parameter server's channel to Kafka: it reads `events` from the end, and writes `commands`, `updates`, `metrics`.

There are no consumer groups and no committed offsets. After a Hello, workers repeat the records that they sent while no
server was running. But a source sends its `SourceEnded` only once. So the channel searches the newest older events for
this record.
"""

from __future__ import annotations

from typing import Final

from doll.config import JobConfig
from doll.errors import ServiceUnavailableError
from doll.kafka.publisher import Delivery, Publisher
from doll.kafka.reader import Message, Partition, Reader
from doll.records.control import AnyRecord, ServerStatus, SourceEnded
from doll.services import Services

_PER_POLL: Final = 500
_LOOKUP_S: Final = 15.0
_LOOK_BACK: Final = 20_000  # number of older events to read, which takes about 0.1 s
_SOURCE_ENDED: Final = str(SourceEnded.__struct_config__.tag).encode()  # in each SourceEnded, and in few other records


class KafkaChannel:
    """The `Outbox` and inbox over Kafka. Not thread-safe: only the main loop may use it, except for `read`. Raises
    ServiceUnavailableError if Kafka does not answer."""

    def __init__(self, config: JobConfig, services: Services) -> None:
        self._commands_topic = config.topic("commands")
        self._updates_topic = config.topic("updates")
        self._metrics_topic = config.topic("metrics")
        self._publisher = Publisher(config, services)
        self._events = Partition(config.topic("events"))
        self._samples_topic = config.topic("samples")
        self._reader = Reader(
            config, services, "ps", [self._events], lambda _, low, high: max(low, high - _LOOK_BACK),
            lookup_timeout_s=_LOOKUP_S,
        )  # fmt: skip
        self._address = services.kafka
        self._acknowledged = 0
        self._had_traffic = False

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        """Return (low, high): the offset of the first record, and the offset of the next new record. Raises
        ServiceUnavailableError if Kafka does not answer."""
        return self._reader.bounds(Partition(topic, partition))

    def poll(self, timeout_s: float) -> list[bytes | None]:
        self.poll_deliveries()
        return self.read(timeout_s)

    def poll_deliveries(self) -> None:
        """Handle the acknowledgements and refusals of Kafka. Raises ServiceUnavailableError if Kafka has refused a
        record permanently."""
        self._publisher.poll()

    def read(self, timeout_s: float) -> list[bytes | None]:
        """Wait at most `timeout_s` seconds for the first new value of `events`, and return all new values. Raises
        ServiceUnavailableError if Kafka refuses to serve this process."""
        messages = self._reader.messages(timeout_s, limit=_PER_POLL)
        self._had_traffic |= bool(messages)
        if messages and messages[0].offset < self._reader.ends[self._events]:
            messages = [message for message in messages if self._is_for_this_server(message)]
        return [message.value for message in messages]

    def _is_for_this_server(self, message: Message) -> bool:
        """Return whether the message is new, or is a SourceEnded that fits the current samples topic."""
        if message.offset >= self._reader.ends[self._events]:
            return True
        if message.value is None or _SOURCE_ENDED not in message.value:
            return False
        record = self._reader.decode(message)
        if not isinstance(record, SourceEnded):
            return False
        # If the topic has been replaced, the new topic has fewer records than the old one had.
        known = self._reader.partition_ends(self._samples_topic) or ()
        return len(record.ends) <= len(known) and all(map(int.__le__, record.ends, known))

    def send_command(self, worker: int, record: AnyRecord) -> None:
        self._publisher.send(self._commands_topic, record, partition=worker, on_delivery=self._on_record)

    def send_update(self, record: AnyRecord) -> None:
        self._publisher.send(self._updates_topic, record, on_delivery=self._on_update)

    def send_status(self, record: ServerStatus) -> None:
        self._publisher.try_send(self._metrics_topic, record, on_delivery=self._on_metric)

    def updates_acknowledged(self) -> int:
        self._publisher.poll()
        return self._acknowledged

    def had_traffic(self) -> bool:
        had_traffic, self._had_traffic = self._had_traffic, False
        return had_traffic

    def flush(self, timeout_s: float) -> int:
        return self._publisher.flush(timeout_s)

    def close(self) -> None:
        self._reader.close()

    def _on_record(self, delivery: Delivery) -> None:
        if delivery.refusal:  # deliveries have no timeout, so this error means that the record can never be written
            raise ServiceUnavailableError(
                f"Kafka at {self._address} refused a record on {delivery.topic}: {delivery.refusal}"
            )
        self._had_traffic = True

    def _on_update(self, delivery: Delivery) -> None:
        self._on_record(delivery)
        self._acknowledged += 1

    def _on_metric(self, delivery: Delivery) -> None:
        self._had_traffic |= not delivery.refusal
