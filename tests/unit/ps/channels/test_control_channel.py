"""The channel around its thread: what happens where Kafka ends while the channel is closed."""

from __future__ import annotations

import threading
from typing import cast

from doll.errors import ServiceUnavailableError
from doll.ps.channels.control_channel import ControlChannel
from doll.ps.channels.control_links import ControlLinks
from doll.ps.channels.kafka_channel import KafkaChannel


class RefusingKafka:
    """Refuses every read."""

    def __init__(self) -> None:
        self.is_closed = False

    def read(self, timeout_s: float) -> list[bytes | None]:
        raise ServiceUnavailableError("refused")

    def close(self) -> None:
        self.is_closed = True


def test_a_refusal_that_nobody_has_polled_does_not_keep_the_channel_from_closing() -> None:
    kafka, before = RefusingKafka(), set(threading.enumerate())
    channel = ControlChannel(cast("KafkaChannel", kafka), ControlLinks(term=1))
    for thread in set(threading.enumerate()) - before:
        thread.join()  # its refusal waits in the channel
    channel.close()
    assert kafka.is_closed
