"""A topic that belongs to somebody else, with its owner's admin client and programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from waiting import WAIT_TIMEOUT_S, until


def samples(count: int) -> list[bytes]:
    """Records of the Gaussian task of the standard job."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, count)
    x = rng.normal(size=(count, 4)) + 2.0 * y[:, None] - 1.0
    return [row.tobytes() for row in np.column_stack([x, y]).astype("<f4")]


class OwnersTopic:
    """`create` it first."""

    def __init__(self, address: str, name: str) -> None:
        self._address, self.name = address, name
        self.admin = AdminClient({"bootstrap.servers": address})
        self._producer = self._new_producer()
        self.partitions = 0

    def _new_producer(self) -> Producer:
        return Producer({"bootstrap.servers": self._address, "enable.idempotence": True})

    def create(self, partitions: int, settings: Mapping[str, str] | None = None, **more: Any) -> None:
        self.partitions = partitions
        placed = more if "replica_assignment" in more else {"replication_factor": 1, **more}
        new = NewTopic(self.name, partitions, config=dict(settings or {}), **placed)
        self.admin.create_topics([new], operation_timeout=60)[self.name].result(60)

    def delete(self) -> None:
        self.admin.delete_topics([self.name], operation_timeout=60)[self.name].result(60)

    def add_partitions(self, total: int) -> None:
        self.admin.create_partitions([NewPartitions(self.name, total)])[self.name].result(60)
        until(lambda: len(self.admin.list_topics(self.name).topics[self.name].partitions) == total, "the partitions")
        self._producer = self._new_producer()  # the one before knows of the others only, for minutes
        self.partitions = total

    def set(self, **settings: str) -> None:
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, self.name, incremental_configs=entries)
        self.admin.incremental_alter_configs([resource])[resource].result(60)

    def delete_records(self, ends: Mapping[int, int]) -> None:
        where = [TopicPartition(self.name, number, end) for number, end in ends.items()]
        for future in self.admin.delete_records(where).values():
            future.result(60)

    def write(self, values: Iterable[tuple[str, bytes]], *, timestamp_ms: int = 0) -> None:
        """Records with keys, which say the partition."""
        more = {"timestamp": timestamp_ms} if timestamp_ms else {}
        for key, value in values:
            self._producer.produce(self.name, value, key, **more)
            self._producer.poll(0)
        assert self._producer.flush(WAIT_TIMEOUT_S) == 0

    def fill(self, partition: int, values: Iterable[bytes], *, timestamp_ms: int = 0) -> None:
        more = {"timestamp": timestamp_ms} if timestamp_ms else {}
        for value in values:
            self._producer.produce(self.name, value, partition=partition, **more)
        assert self._producer.flush(WAIT_TIMEOUT_S) == 0

    def transactional(self, name: str) -> Producer:
        producer = Producer({"bootstrap.servers": self._address, "transactional.id": name})
        producer.init_transactions(60)
        return producer

    def committed(self) -> dict[tuple[int, int], bytes]:
        """Partition and offset of each record that a reader of committed records sees, with its value."""
        settings = {
            "bootstrap.servers": self._address, "group.id": "reader", "enable.auto.commit": False,
            "enable.partition.eof": True, "isolation.level": "read_committed",
        }  # fmt: skip
        consumer = Consumer(settings)
        values: dict[tuple[int, int], bytes] = {}
        try:
            consumer.assign([TopicPartition(self.name, number, 0) for number in range(self.partitions)])
            ended = 0
            while ended < self.partitions:
                message = consumer.poll(WAIT_TIMEOUT_S)
                assert message is not None
                if message.error() is not None:
                    ended += 1
                else:
                    values[message.partition(), message.offset()] = message.value()
        finally:
            consumer.close()
        return values

    def ends(self) -> list[int]:
        wanted = {TopicPartition(self.name, number): OffsetSpec.latest() for number in range(self.partitions)}
        return [future.result(60).offset for future in self.admin.list_offsets(wanted).values()]

    def settings(self) -> dict[str, str | None]:
        resource = ConfigResource(ResourceType.TOPIC, self.name)
        return {
            name: entry.value for name, entry in self.admin.describe_configs([resource])[resource].result(60).items()
        }

    def commit(self, group: str) -> None:
        """Offset n + 1 of partition n, in the name of a group of somebody else."""
        consumer = Consumer({"bootstrap.servers": self._address, "group.id": group, "enable.auto.commit": False})
        try:
            offsets = [TopicPartition(self.name, number, number + 1) for number in range(self.partitions)]
            consumer.commit(offsets=offsets, asynchronous=False)
        finally:
            consumer.close()

    def offsets_of(self, group: str) -> list[int]:
        consumer = Consumer({"bootstrap.servers": self._address, "group.id": group})
        try:
            return [
                item.offset
                for item in consumer.committed([TopicPartition(self.name, n) for n in range(self.partitions)], 60)
            ]
        finally:
            consumer.close()
