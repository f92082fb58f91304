"""The offsets that the workers of a job have committed: what is before them is in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from doll.config import JobConfig
from doll.errors import ServiceUnavailableError
from doll.kafka.clients import ADMIN_S, list_offsets, make_admin, translate_errors
from doll.services import Services

MAX_GROUPS: Final = 100  # each group needs one request


def group_of(job: str, worker: int) -> str:
    """Return the name of a worker's consumer group."""
    return f"doll-{job}-w{worker}"


def groups_of(config: JobConfig) -> list[str]:
    """Return the groups of the job's first `MAX_GROUPS` workers."""
    return [group_of(config.job, worker) for worker in range(min(config.data.workers, MAX_GROUPS))]


def committed_offsets(admin: AdminClient, group: str, places: Sequence[TopicPartition]) -> dict[int, int]:
    """Return the committed offset of each partition that has one. Raise KafkaException if Kafka does not say."""
    request = [ConsumerGroupTopicPartitions(group, list(places))]
    (future,) = admin.list_consumer_group_offsets(request, request_timeout=ADMIN_S).values()
    return {place.partition: place.offset for place in future.result(ADMIN_S).topic_partitions if place.offset >= 0}


def newest(committed: Iterable[dict[int, int]]) -> dict[int, int]:
    """Return the newest offset of each partition over several groups."""
    result: dict[int, int] = {}
    for of_group in committed:
        for partition, offset in of_group.items():
            result[partition] = max(offset, result.get(partition, 0))
    return result


def count_unlearned(config: JobConfig, services: Services) -> int:
    """Return the number of records of the samples topic that no committed offset has passed, with Kafka's markers of
    transactions.

    Raises:
        ServiceUnavailableError: Kafka does not answer, or refuses.
    """
    topic = config.topic("samples")
    admin = make_admin(config, services)
    places = [TopicPartition(topic, number) for number in range(config.data.num_partitions)]
    try:
        with translate_errors(services.kafka, "say how far the workers are"):
            low = list_offsets(admin, places, OffsetSpec.earliest())
            high = list_offsets(admin, places, OffsetSpec.latest())
            learned = newest(committed_offsets(admin, group, places) for group in groups_of(config))
    except TimeoutError as exc:
        raise ServiceUnavailableError(f"Kafka at {services.kafka} does not say how far the workers are") from exc
    return sum(high[topic, number] - max(low[topic, number], learned.get(number, 0)) for number in range(len(places)))
