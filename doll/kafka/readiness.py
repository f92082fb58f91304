"""Check whether brokers that were just started answer, accept records and commit offsets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from doll.kafka.clients import error_of, make_probe_client

READY_TOPIC: Final = "doll-ready"  # the probe writes to it
# 3 s on an idle machine; 50 s were measured with 20 processes per core, or with a log to recover.
_START_S: Final = 240.0


def is_ready(address: str, cluster_id: str, alive: Callable[[], bool], brokers: int = 1) -> bool:
    """Return whether a node, or all `brokers` of a cluster, work, before a process exits (`alive`) or the time is over.
    The brokers must have this `cluster_id`, because another program may answer on the port.

    A record of an idempotent producer shows that the node writes and assigns producer ids. A committed offset shows
    that `__consumer_offsets` exists: while Kafka creates this topic, a consumer with a group may wait for minutes.
    """
    admin = make_probe_client(AdminClient, address)
    steps = (lambda: _is_ours(admin, cluster_id, brokers), lambda: _writes(address), lambda: _commits(address))
    deadline_s = time.monotonic() + _START_S

    def succeeds(step: Callable[[], bool]) -> bool:
        while alive() and time.monotonic() < deadline_s:
            with contextlib.suppress(KafkaException):  # not yet: the node's components start one after another
                if step():
                    return True
            time.sleep(0.05)
        return False

    return all(map(succeeds, steps))


def _is_ours(admin: AdminClient, cluster_id: str, brokers: int) -> bool:
    """Return whether this run's node answers (another run may have the same port), and the probe's topic exists."""
    metadata = admin.list_topics(timeout=1.0)
    if metadata.cluster_id != cluster_id or len(metadata.brokers) < brokers:
        return False
    if READY_TOPIC in metadata.topics:
        return all(partition.leader >= 0 for partition in metadata.topics[READY_TOPIC].partitions.values())
    topic = NewTopic(READY_TOPIC, num_partitions=1, replication_factor=brokers, config={"retention.ms": "3600000"})
    try:
        admin.create_topics([topic], request_timeout=5.0)[READY_TOPIC].result()
    except KafkaException as exc:
        if error_of(exc).code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise
    return False


def _writes(address: str) -> bool:
    acked: list[bool] = []
    settings = {"enable.idempotence": True, "linger.ms": 0, "message.timeout.ms": 5000}
    producer = make_probe_client(Producer, address, settings)
    producer.produce(READY_TOPIC, b"ready", on_delivery=lambda error, message: acked.append(error is None))
    producer.flush(6.0)
    return acked == [True]


def _commits(address: str) -> bool:
    consumer = make_probe_client(Consumer, address, {"group.id": READY_TOPIC, "enable.auto.commit": False})
    try:
        committed = consumer.commit(offsets=[TopicPartition(READY_TOPIC, 0, 1)], asynchronous=False)
        return bool(committed) and committed[0].error is None
    finally:
        consumer.close()
