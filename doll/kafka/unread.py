"""Records that are not read: a batch of the log that the client library cannot read, a value above the job's limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from confluent_kafka import KafkaError, TopicPartition

from doll.errors import ServiceUnavailableError
from doll.records.control import DeadLetterCode

# What the library says of a batch of records: checksum, compression, an unknown codec, its form.
UNREADABLE: Final = frozenset(
    {KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError._NOT_IMPLEMENTED, KafkaError.INVALID_MSG}
)
_POLL_S: Final = 0.1
_PROBE_S: Final = 30.0


class UnreadValue(bytes):
    """Stands for a value that was not read, or not kept: as bytes it is empty, so it is never decoded.

    Attributes:
        code, reason: of its dead letter.
        num_bytes: of the value; 0 where it is not known.
        head: its first bytes.
    """

    code: DeadLetterCode
    reason: str
    num_bytes: int
    head: bytes

    @classmethod
    def of(cls, code: DeadLetterCode, reason: str, num_bytes: int = 0, head: bytes = b"") -> UnreadValue:
        self = cls()
        self.code, self.reason, self.num_bytes, self.head = code, reason, num_bytes, head
        return self


def unreadable(error: Any) -> bool:
    """Whether an error of a consumer is about a batch of records that it cannot read."""
    return error.code() in UNREADABLE


def end_of_unreadable(
    consumer: Any, partition: tuple[str, int], base: int, should_stop: Callable[[], bool] = lambda: False
) -> int:
    """The offset behind a batch that the library cannot read.

    The library names the first offset of the batch (`base`) wherever in the batch it begins to read, and stays there.
    So the end is found by reading from offsets behind it: as many as the batch's length has bits, twice. `consumer` has
    another assignment afterwards; it must report ends of partitions, and an offset out of range.

    Raises:
        ServiceUnavailableError: Kafka does not answer for 30 s.
    """

    def is_inside(offset: int) -> bool:
        consumer.assign([TopicPartition(*partition, offset)])
        deadline_s = time.monotonic() + _PROBE_S
        while not should_stop():
            if (message := consumer.poll(_POLL_S)) is not None:
                if (error := message.error()) is None:
                    return False
                if unreadable(error):
                    return bool(message.offset() == base)
                if error.code() in (KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET):
                    return False
            if time.monotonic() > deadline_s:
                raise ServiceUnavailableError(
                    f"Kafka has sent nothing of {partition[0]}/{partition[1]} at offset {offset} for {_PROBE_S:g} s, "
                    "while the end of a batch that cannot be read was looked for: is the broker running?"
                )
        return False

    inside, step = base, 1
    while is_inside(inside + step):
        inside, step = inside + step, 2 * step
    outside = inside + step
    while outside - inside > 1:
        middle = (inside + outside) // 2
        if is_inside(middle):
            inside = middle
        else:
            outside = middle
    return outside
