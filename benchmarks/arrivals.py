"""How many samples a job's producer really sent: from the time stamps of the records in Kafka."""

from __future__ import annotations

import contextlib

from confluent_kafka import TopicPartition
from doll.config import JobConfig
from doll.kafka.clients import make_consumer
from doll.kafka.reader import partition_bounds
from doll.services import Services

_TIMEOUT_S = 15.0


def arrivals_between(config: JobConfig, services: Services, from_s: float, to_s: float) -> int:
    """Samples of all streams whose records were sent in [from_s, to_s), seconds of `time.time()`.

    Exact to the millisecond of a record's time stamp, if `data.samples_per_record` is 1.
    """
    topic, total = config.topic("samples"), 0
    consumer = make_consumer(config, services, "arrivals")
    with contextlib.closing(consumer):
        for partition in range(config.data.workers):
            _, end = partition_bounds(consumer, services.kafka, topic, partition)
            first, last = (
                consumer.offsets_for_times([TopicPartition(topic, partition, round(1e3 * at))], timeout=_TIMEOUT_S)[0]
                for at in (from_s, to_s)
            )
            lo, hi = (found_at.offset if found_at.offset >= 0 else end for found_at in (first, last))  # -1: none later
            total += hi - lo
    return total * config.data.samples_per_record
