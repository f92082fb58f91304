"""A compressed batch that is far larger when it is unpacked."""

from __future__ import annotations

from doll.config import JobConfig
from doll.errors import ServiceUnavailableError
from doll.kafka.clients import make_producer
from doll.kafka.reader import Partition
from doll.services import Services

_SEND_S = 60.0


def send_bomb(
    config: JobConfig, services: Services, partition: Partition, *, codec: str, size_bytes: int, records: int = 1
) -> None:
    """Write one compressed batch of `records` records of zeros with `size_bytes` bytes each.

    Args:
        codec: gzip, snappy, lz4 or zstd.

    Raises:
        ServiceUnavailableError: Kafka does not take it.
    """
    failures: list[str] = []
    producer = make_producer(
        config, services, compression_type=codec, message_max_bytes=1_000_000_000, batch_size=2_147_483_647,
        batch_num_messages=1_000_000, linger_ms=60_000, queue_buffering_max_kbytes=2_097_151,
    )  # fmt: skip
    value = bytes(size_bytes)
    for _ in range(records):
        producer.produce(
            partition.topic, value, partition=partition.number,
            on_delivery=lambda error, message: failures.append(error.str()) if error is not None else None,
        )  # fmt: skip
    if (left := producer.flush(_SEND_S)) or failures:
        raise ServiceUnavailableError(
            f"expected Kafka at {services.kafka} to take a batch of {records} x {size_bytes} bytes ({codec}), got "
            f"{failures[0] if failures else f'no answer about {left} records'}"
        )
