"""The parameter server's channel to Kafka: reads `events` from its end, writes `commands`, `updates` and `metrics`.

No consumer group and no committed offsets: what was sent while no server was there, workers send again after Hello.
"""

from __future__ import annotations

from typing import Final

from doll.config import JobConfig
from doll.errors import ServiceUnavailableError
from doll.kafka.publisher import Delivery, Publisher
from doll.kafka.reader import Partition, Reader, from_end
from doll.records.control import AnyRecord, ServerStatus
from doll.services import Services

_PER_POLL: Final = 500
_LOOKUP_S: Final = 15.0


class KafkaChannel:
    """`Outbox` and inbox over Kafka. Not thread-safe: one loop owns it; only `read` may be called by another thread.

    Raises:
        ServiceUnavailableError: Kafka does not answer.
    """

    def __init__(self, config: JobConfig, services: Services) -> None:
        self._commands_topic = config.topic("commands")
        self._updates_topic = config.topic("updates")
        self._metrics_topic = config.topic("metrics")
        self._publisher = Publisher(config, services)
        self._reader = Reader(
            config, services, "ps", [Partition(config.topic("events"))], from_end, lookup_timeout_s=_LOOKUP_S,
        )  # fmt: skip
        self._address = services.kafka
        self._acknowledged = 0
        self._had_traffic = False

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        """(low, high): offset of the first record held, and the offset that the next one gets.

        Raises:
            ServiceUnavailableError: Kafka does not answer.
        """
        return self._reader.bounds(Partition(topic, partition))

    def poll(self, timeout_s: float) -> list[bytes | None]:
        """`poll_deliveries`, then `read`."""
        self.poll_deliveries()
        return self.read(timeout_s)

    def poll_deliveries(self) -> None:
        """Handle what Kafka has acknowledged or refused.

        Raises:
            ServiceUnavailableError: Kafka has refused a record permanently.
        """
        self._publisher.poll()

    def read(self, timeout_s: float) -> list[bytes | None]:
        """Values that have come on `events`, waiting for the first one at most `timeout_s`.

        Raises:
            ServiceUnavailableError: Kafka refuses to serve this process.
        """
        messages = self._reader.messages(timeout_s, limit=_PER_POLL)
        self._had_traffic |= bool(messages)
        return [message.value for message in messages]

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
        """Whether Kafka has sent or acknowledged anything since the last call."""
        had_traffic, self._had_traffic = self._had_traffic, False
        return had_traffic

    def flush(self, timeout_s: float) -> int:
        """Wait until everything is delivered; how many records are not when the time is over."""
        return self._publisher.flush(timeout_s)

    def close(self) -> None:
        self._reader.close()

    def _on_record(self, delivery: Delivery) -> None:
        if delivery.refusal:  # never for being late: no time limit is set, so this record can never be written
            raise ServiceUnavailableError(
                f"Kafka at {self._address} refused a record on {delivery.topic}: {delivery.refusal}"
            )
        self._had_traffic = True

    def _on_update(self, delivery: Delivery) -> None:
        self._on_record(delivery)
        self._acknowledged += 1

    def _on_metric(self, delivery: Delivery) -> None:
        self._had_traffic |= not delivery.refusal
