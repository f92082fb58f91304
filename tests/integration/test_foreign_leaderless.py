"""A partition of a foreign topic without a leader: nobody starts, who runs waits and says so, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from doll.errors import ServiceUnavailableError
from doll.kafka import foreign_topic
from doll.local import kafka_jars
from doll.local.kafka_broker import KafkaCluster
from doll.local.redis_server import LocalRedis
from doll.services import Services
from job_rig import MakePipeline
from owners_topic import OwnersTopic, samples
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.integration]  # starts servers


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KafkaCluster]:
    if (unavailable_reason := kafka_jars.unavailable_reason()) is not None:
        pytest.skip(f"no Kafka broker can be started: {unavailable_reason}")
    with KafkaCluster(tmp_path / "kafka", ({}, {}, {})) as cluster:
        yield cluster


@pytest.fixture
def services(cluster: KafkaCluster, redis_server: LocalRedis) -> Services:
    return Services(cluster.address, redis_server.address)


def test_records_of_a_partition_without_a_leader_are_waited_for(
    cluster: KafkaCluster, services: Services, make_pipeline: MakePipeline
) -> None:
    owner = OwnersTopic(services.kafka, "clicks")
    owner.create(2, {"min.insync.replicas": "1"}, replica_assignment=[[1], [2]])
    for partition in range(2):
        owner.fill(partition, samples(32))
    job = make_pipeline("data.topic=clicks", "data.partitions=2", "kafka.replication_factor=3")
    job.start()
    job.until(lambda: len(job.store.versions()) > 0 and job.checkpoint().version >= 4, "everything")
    cluster.nodes[1].kill()
    line = "no leader for partition 1 (copies on brokers 2)"
    job.until(lambda: line in job.log("ps"), "the server says so")
    with pytest.raises(ServiceUnavailableError) as error:
        foreign_topic.require(job.config, services)
    assert line in str(error.value)
    owner.fill(0, samples(64))
    job.until(lambda: job.version >= 6, "the other partition is learned from")
    cluster.nodes[1].launch()
    until(lambda: foreign_topic.look_up(job.config, services).leaderless == (), "it has a leader again")
    owner.fill(1, samples(32))
    job.until(lambda: "samples_topic_is_back" in job.log("ps"), "the server says so")
    job.until(lambda: job.version >= 10, "both are learned from")
    job.role("ps").terminate()
    report = job.assert_audit_ok()
    assert (report.produced, report.lost) == (160, 0)
