"""Where partitions begin and end, as their leaders say."""

from __future__ import annotations

from typing import Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from doll.kafka.errors import retry_while_leaderless, translate_errors

_TIMEOUT_S: Final = 15.0


def partition_bounds(
    consumer: Consumer, address: str, topic: str, partition: int, timeout_s: float = _TIMEOUT_S
) -> tuple[int, int]:
    """(low, high): the first offset that a partition still holds, and the one that its next record gets.

    Raises:
        ServiceUnavailableError: Kafka does not answer, or the topic does not exist.
    """

    def fetch() -> tuple[int, int]:
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=timeout_s, cached=False)
        return int(low), int(high)

    with translate_errors(address, f"say where {topic}/{partition} begins and ends"):
        return retry_while_leaderless(fetch)


def partition_ends(consumer: Consumer, topic: str, partitions: int, timeout_s: float) -> list[int] | None:
    """The end (high watermark) of each partition; None where a broker does not answer within `timeout_s`."""
    try:
        return [
            int(consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=timeout_s, cached=False)[1])
            for number in range(partitions)
        ]
    except KafkaException:
        return None
