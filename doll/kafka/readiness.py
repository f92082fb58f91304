"""Check whether brokers that were just started answer, accept records and commit offsets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from doll.kafka.clients import ProbeClients, error_of

READY_TOPIC: Final = "doll-ready"  # the probe writes to it
# 3 s on an idle machine; 50 s were measured with 20 processes per core, or with a log to recover.
_START_S: Final = 240.0


class ReadinessProbe:
    """A check that a node, or all `brokers` of a cluster, work while their processes are `alive`. The brokers must have
    this `cluster_id`, because another program may answer on the port.

    A record of an idempotent producer shows that the node writes and assigns producer ids. A committed offset shows
    that `__consumer_offsets` exists: while Kafka creates this topic, a consumer with a group may wait for minutes.
    """

    def __init__(self, address: str, cluster_id: str, alive: Callable[[], bool], brokers: int = 1) -> None:
        self._brokers = brokers
        self._clients = ProbeClients(address)
        self._cluster_id = cluster_id
        self._alive = alive
        self._deadline_s = time.monotonic() + _START_S

    def run(self) -> bool:
        """Return whether the node works, before its process exits or the time is over."""
        return (
            self._retry(self._is_ours, self._clients.admin())
            and self._retry(self._writes)
            and self._retry(self._commits)
        )

    def _retry(self, step: Callable[..., bool], *args: Any) -> bool:
        while self._alive() and time.monotonic() < self._deadline_s:
            try:
                if step(*args):
                    return True
            except KafkaException:
                pass  # not yet: the node's components start one after another
            time.sleep(0.05)
        return False

    def _is_ours(self, admin: AdminClient) -> bool:
        """Return whether this run's node answers (another run may have the same port), and the probe's topic exists."""
        metadata = admin.list_topics(timeout=1.0)
        if metadata.cluster_id != self._cluster_id or len(metadata.brokers) < self._brokers:
            return False
        if READY_TOPIC in metadata.topics:
            return all(partition.leader >= 0 for partition in metadata.topics[READY_TOPIC].partitions.values())
        topic = NewTopic(
            READY_TOPIC, num_partitions=1, replication_factor=self._brokers, config={"retention.ms": "3600000"}
        )
        try:
            admin.create_topics([topic], request_timeout=5.0)[READY_TOPIC].result()
        except KafkaException as exc:
            if error_of(exc).code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
        return False

    def _writes(self) -> bool:
        acked: list[bool] = []
        producer = self._clients.producer(message_timeout_ms=5000)
        producer.produce(READY_TOPIC, b"ready", on_delivery=lambda error, message: acked.append(error is None))
        producer.flush(6.0)
        return acked == [True]

    def _commits(self) -> bool:
        consumer = self._clients.consumer(group=READY_TOPIC)
        try:
            committed = consumer.commit(offsets=[TopicPartition(READY_TOPIC, 0, 1)], asynchronous=False)
            return bool(committed) and committed[0].error is None
        finally:
            consumer.close()
