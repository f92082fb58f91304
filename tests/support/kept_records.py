"""A publisher that keeps what is sent."""

from __future__ import annotations

from typing import Any, cast

from doll.kafka.publisher import Publisher
from doll.records.control import AnyRecord


class KeptRecords:
    """What was sent, as (topic, record).

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[str, AnyRecord]] = []
        self.closed = False

    def try_send(self, topic: str, record: AnyRecord, **_: Any) -> bool:
        self.sent.append((topic, record))
        return True

    send = try_send

    def poll(self, timeout_s: float = 0.0) -> None:
        return None

    def close(self, timeout_s: float = 5.0) -> None:
        self.closed = True

    @property
    def publisher(self) -> Publisher:
        return cast(Publisher, self)
