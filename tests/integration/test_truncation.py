"""A log of samples that an election truncates, and that is refilled while no worker reads it: refused, not learned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from doll.kafka.clients import kafka_settings
from doll.local import kafka_jars
from doll.local.kafka_broker import KafkaCluster
from doll.local.redis_server import LocalRedis
from doll.services import Services
from job_rig import MakePipeline
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.integration


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KafkaCluster]:
    if (unavailable_reason := kafka_jars.unavailable_reason()) is not None:
        pytest.skip(f"no Kafka broker can be started: {unavailable_reason}")
    with KafkaCluster(tmp_path / "kafka", ({}, {}, {})) as cluster:
        yield cluster


@pytest.fixture
def services(cluster: KafkaCluster, redis_server: LocalRedis) -> Services:
    return Services(cluster.address, redis_server.address)


@pytest.fixture
def samples_topic(services: Services, job_name: str) -> str:
    """The job's topic of samples on the nodes 1 and 2, which a node that was not in sync may lead."""
    admin = AdminClient({"bootstrap.servers": services.kafka})
    name = f"doll.{job_name}.samples"
    settings = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
    topic = NewTopic(name, num_partitions=2, replica_assignment=[[1, 2], [1, 2]], config=settings)
    for future in admin.create_topics([topic], operation_timeout=60).values():
        future.result(60)
    return name


def test_a_log_that_was_truncated_and_refilled_while_no_worker_read_it_is_refused(
    cluster: KafkaCluster, samples_topic: str, make_pipeline: MakePipeline
) -> None:
    job = make_pipeline("kafka.replication_factor=3")
    admin = AdminClient(kafka_settings(job.config, job.services))

    def leads(node: int, replicas: int) -> bool:
        partitions = admin.list_topics(samples_topic, timeout=WAIT_TIMEOUT_S).topics[samples_topic].partitions.values()
        return all(partition.leader == node and len(partition.isrs) == replicas for partition in partitions)

    roles = [job.launch("ps", "ps_role"), *(job.launch(f"worker-{n}", "worker_role", n) for n in range(2))]
    job.send(job.samples(32))
    job.until(lambda: len(job.store.versions()) > 0 and job.checkpoint().version >= 2, "two durable updates")
    cluster.nodes[1].kill()
    until(lambda: leads(1, 1), "node 2 is not in sync any more")
    job.send(job.samples(64))
    job.until(lambda: job.checkpoint().version >= 6, "six durable updates")
    for role in roles:
        role.kill()
        role.wait(WAIT_TIMEOUT_S)

    cluster.nodes[0].kill()
    cluster.nodes[1].launch()
    until(lambda: leads(2, 1), "node 2 leads, without the last 64 records")
    refill = Producer(kafka_settings(job.config, job.services))  # the job's own knows what was acknowledged
    for number, value in enumerate(job.samples(160)):  # so that both partitions are longer than before
        refill.produce(samples_topic, value, partition=number % 2)
    assert refill.flush(WAIT_TIMEOUT_S) == 0
    cluster.nodes[0].launch()
    until(lambda: leads(2, 2), "node 1 has what node 2 has")

    job.launch("ps again", "ps_role")
    assert job.launch("worker-0 again", "worker_role", 0).wait(60.0) == 2
    log = job.log("worker-0 again")
    assert "samples/0 was read up to offset 48, has lost records below it since" in log
    assert "Partition log truncation detected at offset 48 (leader epoch 0): broker end offset is 16" in log
