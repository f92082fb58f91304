"""Damage to the samples topic that a real cluster can take: a log that loses its end, and a record made to expand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from doll.errors import ServiceUnavailableError
from doll.kafka.clients import make_producer

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.kafka.reader import Partition
    from doll.services import Services

_SEND_S = 60.0
_DERIVED = (".index", ".timeindex", ".snapshot")


def truncate_log(broker_folder: Path, partition: Partition, share: float) -> None:
    """Keep the first `share` of the bytes of a partition's newest segment, as a power loss without fsync may.

    The broker must have been killed (`LocalKafka.kill`); it rebuilds its indexes when it is started again.

    Args:
        broker_folder: the folder of a `LocalKafka`.

    Raises:
        FileNotFoundError: the broker has no log of `partition`.
    """
    logs = sorted(broker_folder.rglob(f"{partition.topic}-{partition.number}/*.log"))
    if not logs:
        raise FileNotFoundError(f"{broker_folder}: expected a log of {partition}")
    os.truncate(logs[-1], int(logs[-1].stat().st_size * share))
    for file in logs[-1].parent.iterdir():
        if file.suffix in _DERIVED:
            file.unlink()


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
