"""A cluster of three real brokers: one dies while a job runs on it, and none outlives the process that started them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from doll.kafka import topics
from doll.local import kafka_jars
from doll.local.redis_server import LocalRedis
from doll.services import Services
from job_files import job
from job_rig import MakePipeline
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.integration

HOLDER = """
import json, os, pathlib, sys
from doll.local.kafka_broker import KafkaCluster

with KafkaCluster(pathlib.Path(sys.argv[1]), ({}, {}, {})) as cluster:
    print(json.dumps({"address": cluster.address, "pids": [node.pid for node in cluster.nodes]}), flush=True)
    while True:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # one has died; `restart_dead` takes its exit code
        cluster.restart_dead()
"""


class Held(NamedTuple):
    process: subprocess.Popen[str]
    address: str
    pids: list[int]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """Started, and started again where a node dies, by a process of its own."""
    if (unavailable_reason := kafka_jars.unavailable_reason()) is not None:
        pytest.skip(f"no Kafka broker can be started: {unavailable_reason}")
    folder = tmp_path_factory.mktemp("cluster")
    with (folder / "holder.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said, (folder / "holder.log").read_text()
        yield Held(process, **json.loads(said))
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def services(cluster: Held, redis_server: LocalRedis) -> Services:
    """Addresses of the cluster and the session's Redis."""
    return Services(cluster.address, redis_server.address)


def test_topics_that_were_just_created_are_there_on_every_broker(services: Services) -> None:
    for number in range(5):
        config = job("kafka.replication_factor=3", name=f"everywhere-{number}", workers=8)
        topics.ensure(config, services)
        for address in services.kafka.split(","):
            topics.check(config, dataclasses.replace(services, kafka=address))


def test_a_job_goes_on_without_one_broker_and_loses_nothing(
    cluster: Held, make_pipeline: MakePipeline, tmp_path: Path
) -> None:
    pipeline = make_pipeline("kafka.replication_factor=3")
    pipeline.start()
    pipeline.send(pipeline.samples(160))
    pipeline.until_version(5)
    # The one that leads the partition on which all updates are written.
    leader = cluster.pids[leader_of(pipeline) - 1]
    os.kill(leader, signal.SIGKILL)
    pipeline.send(pipeline.samples(320))
    pipeline.until_version(15)  # 480 samples in groups of 2 batches of 8 are 30 updates
    report = pipeline.assert_audit_ok()
    assert (report.missing, report.twice) == ((), ())


def leader_of(pipeline: Any) -> int:
    from confluent_kafka.admin import AdminClient
    from doll.kafka.clients import kafka_settings

    topic = pipeline.config.topic("updates")
    admin = AdminClient(kafka_settings(pipeline.config, pipeline.services))
    return int(admin.list_topics(topic, timeout=WAIT_TIMEOUT_S).topics[topic].partitions[0].leader)


def test_no_broker_outlives_the_process_that_started_them(cluster: Held) -> None:
    holder = psutil.Process(cluster.process.pid)
    nodes = holder.children(recursive=True)
    assert len(nodes) >= 2  # the dead one may be on its way back
    holder.kill()
    until(lambda: all(gone(node) for node in nodes), "the brokers end")


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
