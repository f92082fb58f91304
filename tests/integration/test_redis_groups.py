"""A job's blobs, leases and control streams in a Redis Cluster and behind a Sentinel, through moves and a failover."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from certificates import Authority
from doll.consumers.lifecycle.redis_slots import SlotLeases
from doll.control.redis_streams import ControlStreams, server_stream
from doll.local import processes
from doll.local.kafka_broker import LocalKafka
from doll.local.redis_server import find_executable
from doll.services import Services
from doll.storage.blobs import decode_blob, encode_blob, key_prefix, weights_key
from doll.storage.redis_blobs import RedisBlobs
from doll.storage.redis_client import connect_redis, delete_keys, redis_problem
from doll.storage.redis_diagnosis import ask_redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis_groups import (
    PRIMARY,
    Cluster,
    Watched,
    free_pair,
    redis_cluster,
    redis_process,
    supports_tls,
    watched_redis,
)
from waiting import until

pytestmark = pytest.mark.integration

JOB = "j"
ARRAY = np.arange(40_000, dtype=np.float32)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with watched_redis(tmp_path) as made:
        yield made


def put(blobs: RedisBlobs, version: int) -> str:
    key = weights_key(JOB, 1, version)
    blobs.put(key, encode_blob(ARRAY, job=JOB, kind="w", version=version), 60.0)
    return key


def is_there(blobs: RedisBlobs, version: int) -> bool:
    data = blobs.get(weights_key(JOB, 1, version))
    if data is None:
        return False
    return np.array_equal(decode_blob(data, job=JOB, kind="w", version=version, numel=len(ARRAY)), ARRAY)


def check_all_users(services: Services) -> None:
    """Blobs, leases with scripts and several keys, streams, and the doctor's probe."""
    blobs = RedisBlobs(connect_redis(services))
    keys = [put(blobs, version) for version in range(3)]
    blobs.prefetch(keys)
    assert all(is_there(blobs, version) for version in range(3))
    blobs.delete(*keys)
    assert not is_there(blobs, 0)
    blobs.close()
    client = connect_redis(services)
    leases = SlotLeases(client, JOB, 4, 30.0)
    assert leases.take() == 0
    assert leases.renew(0)
    assert leases.free() == [1, 2, 3]
    leases.release(0)
    assert leases.free() == [0, 1, 2, 3]
    client.close()
    streams = ControlStreams(services, server_stream(JOB, 1), time.monotonic())
    assert delete_keys(services, f"{key_prefix(JOB)}:control:*") == 1
    streams.close()
    facts = ask_redis(services, JOB)
    assert (facts.refusal, facts.denied) == ("", ())


def test_all_of_a_job_is_on_one_node_of_a_cluster(cluster: Cluster) -> None:
    services = Services("", f"{cluster.address}/{JOB}")
    assert redis_problem(services) is None
    check_all_users(services)
    with connect_redis(services) as client:
        client.set(weights_key(JOB, 1, 1), b"here")
    owner = cluster.owner(key_slot(key_prefix(JOB).encode()))
    held: list[Any] = [client.dbsize() for client in cluster.clients]
    assert [number for number, keys in enumerate(held) if keys] == [owner]


def test_clients_follow_a_slot_that_moves_to_another_node(cluster: Cluster) -> None:
    services = Services("", f"{cluster.address}/{JOB}")
    blobs = RedisBlobs(connect_redis(services))
    put(blobs, 1)
    slot = key_slot(key_prefix(JOB).encode())
    cluster.move(slot, (cluster.owner(slot) + 1) % 3)
    assert not is_there(blobs, 1)  # a cache that has lost its contents
    put(blobs, 2)
    assert is_there(blobs, 2)
    blobs.close()
    check_all_users(services)


def test_a_server_that_is_no_cluster_is_named(redis_server: Any) -> None:
    problem = redis_problem(
        Services("", redis_server.address.replace("redis://", "redis+cluster://").replace("/0", "/j"))
    )
    assert problem is not None
    assert "cluster support disabled" in problem


def test_clients_follow_a_sentinel_to_the_new_primary(watched: Watched) -> None:
    services = Services("", watched.address)
    check_all_users(services)
    blobs = RedisBlobs(connect_redis(services))
    put(blobs, 1)
    os.kill(watched.primary_pid, signal.SIGKILL)
    put(blobs, 2)  # waits for the failover
    assert is_there(blobs, 2)
    blobs.close()
    until(lambda: redis_problem(services) is None, "the new primary answers")
    check_all_users(services)


def test_a_sentinel_without_that_primary_is_named(watched: Watched) -> None:
    problem = redis_problem(Services("", watched.address.replace("/main/", "/other/")))
    assert problem is not None
    assert "No master found for 'other'" in problem


USER, PASSWORD, SENTINEL_PASSWORD = "doll", "r3dis-hush", "s3ntinel-hush"


@pytest.fixture
def encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The PEM file of servers that speak TLS; our own certificate, which they ask for, is in the environment."""
    executable = find_executable()
    if executable is None or not supports_tls(executable):
        pytest.skip(f"{executable} was built without TLS: install Debian's redis-server, for instance")
    authority = Authority(tmp_path)
    own = str(authority.issue("client"))
    log_in = {"CA": str(authority.path), "CERT": own, "KEY": own, "USERNAME": USER, "PASSWORD": PASSWORD}
    for name, value in {**log_in, "SENTINEL_PASSWORD": SENTINEL_PASSWORD}.items():
        monkeypatch.setenv(f"DOLL_REDIS_{name}", value)
    return authority.issue("server")


def tls(own: Path, port: int) -> list[str]:
    return ["--tls-port", str(port), "--tls-cert-file", str(own), "--tls-key-file", str(own), "--tls-ca-cert-file",
            str(own.with_name("ca.pem")), "--tls-auth-clients", "yes"]  # fmt: skip


def set_user(port: int) -> None:
    client: Any = redis.Redis(port=port)
    client.execute_command("ACL", "SETUSER", USER, "on", f">{PASSWORD}", "~doll:*", "+@all", "-@dangerous")
    client.close()


def test_a_cluster_over_tls_with_certificates_and_an_acl_user(encrypted: Path, tmp_path: Path) -> None:
    plain, secure = free_pair(), free_pair()
    settings = [*tls(encrypted, secure), "--tls-cluster", "yes", "--cluster-enabled", "yes"]
    with redis_process(tmp_path, "node", plain, *settings):
        client: Any = redis.Redis(port=plain)
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, REDIS_CLUSTER_HASH_SLOTS - 1)
        until(lambda: b"cluster_state:ok" in raw_info(plain), "the cluster is whole")
        client.close()
        set_user(plain)
        check_all_users(Services("", f"rediss+cluster://127.0.0.1:{secure}/{JOB}"))


def raw_info(port: int) -> bytes:
    connection: Any = redis.Connection(port=port, protocol=2)
    try:
        connection.send_command("CLUSTER", "INFO")
        return bytes(connection.read_response())
    finally:
        connection.disconnect()


def test_a_sentinel_over_tls_with_certificates_and_log_ins(encrypted: Path, tmp_path: Path) -> None:
    plain, secure, sentinel_plain, sentinel = (processes.free_port() for _ in range(4))
    with redis_process(tmp_path, "primary", plain, *tls(encrypted, secure)):
        set_user(plain)
        config = tmp_path / "sentinel.conf"
        config.write_text(f"sentinel monitor {PRIMARY} 127.0.0.1 {secure} 1\ntls-replication yes\n")
        words = [str(config), *tls(encrypted, sentinel), "--requirepass", SENTINEL_PASSWORD, "--sentinel"]
        executable = find_executable()
        assert executable is not None
        with (tmp_path / "sentinel.log").open("wb") as log:
            process = subprocess.Popen(
                [executable, words[0], "--port", str(sentinel_plain), *words[1:]], stdout=log, stderr=log
            )
        try:
            services = Services("", f"rediss+sentinel://127.0.0.1:{sentinel}/{PRIMARY}")
            until(lambda: redis_problem(services) is None, lambda: str(redis_problem(services)), 60)
            check_all_users(services)
        finally:
            process.kill()
            process.wait()


JOB_FILE = """
job: {job}
task: {{class: 'examples.synthetic.task:Gaussian', args: {{features: 4, hidden: [8]}}}}
data: {{workers: 2, batch_size: 8}}
source: {{kind: python, of: examples.synthetic.source:gaussians, args: {{features: 4, classes: 2}}}}
arrivals: {{process: poisson, rate_per_s: 200}}
training: {{policy: {{name: doll, group_size: 2}}}}
kafka: {{address: '{kafka}'}}
redis: {{address: '{redis}'}}
control: {{kind: redis}}
evaluation: {{enabled: false}}
stop: {{updates: 20}}
"""


def test_a_whole_job_on_a_cluster(cluster: Cluster, broker: LocalKafka, tmp_path: Path, job_name: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB_FILE.format(job=job_name, kafka=broker.address, redis=cluster.address))
    done = subprocess.run(
        [sys.executable, "-m", "doll", "up", "job.yaml", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["updates"], report["redis_kind"], report["audit"]["ok"]) == (20, "given", True)
    logs = "".join(path.read_text() for path in (tmp_path / "runs").rglob("*.log"))
    assert "control_channel" in logs
    assert "kind=redis" in logs
