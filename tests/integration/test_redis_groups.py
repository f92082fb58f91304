"""A job's blobs, leases and control streams in a Redis Cluster and behind a Sentinel, through moves and a failover."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doll.consumers.lifecycle.redis_slots import SlotLeases
from doll.control.redis_streams import Streams, server_stream
from doll.services import Services
from doll.storage.blobs import decode_blob, encode_blob, key_prefix, weights_key
from doll.storage.redis_blobs import RedisBlobs
from doll.storage.redis_client import connect_redis, delete_keys, redis_problem
from doll.storage.redis_diagnosis import ask_redis
from redis.crc import key_slot
from redis_groups import Cluster, Watched, redis_cluster, watched_redis
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
    streams = Streams(services, server_stream(JOB, 1), time.monotonic())
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
