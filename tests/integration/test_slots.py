"""Leases of slots in a real Redis: each has one holder, spares take over, and what is lost is noticed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from doll.config import JobConfig, parse
from doll.consumers.lifecycle.redis_slots import SlotLeases, lease_slot
from doll.local.redis_server import LocalRedis
from doll.services import Services
from doll.storage.redis_client import WorkerCount, connect_redis
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.integration


def config_of(job: str, workers: int, lease_s: float) -> JobConfig:
    return parse(
        f"job: {job}\ntask: {{class: 'a:B'}}\ndata: {{workers: {workers}}}\nworker: {{lease_s: {lease_s}}}\n"
        "training: {policy: {name: asp}}\n"
    )


@pytest.fixture
def client(redis_server: LocalRedis) -> Iterator[redis.Redis]:
    client = connect_redis(Services("", redis_server.address))
    yield client
    client.close()


def test_many_at_once_get_a_slot_each_and_the_rest_none(client: redis.Redis, job_name: str) -> None:
    seekers = [SlotLeases(client, job_name, 8, ttl_s=600) for _ in range(20)]
    with ThreadPoolExecutor(20) as pool:
        taken = list(pool.map(SlotLeases.take, seekers))
    assert sorted(slot for slot in taken if slot is not None) == list(range(8))
    assert seekers[0].free() == []


def test_a_job_that_is_scaled_has_as_many_slots_as_it_is_to_have_workers(client: redis.Redis, job_name: str) -> None:
    one, other = SlotLeases(client, job_name, 1, ttl_s=600), SlotLeases(client, job_name, 1, ttl_s=600)
    count = WorkerCount(client, job_name)
    assert one.take() == 0
    assert other.take() is None
    assert count.set(2)
    assert other.take() == 1
    assert count.set(1)
    assert (one.free(), one.workers) == ([], 1)
    client.set(f"doll:{{{job_name}}}:workers", "many")
    assert one.workers == 1, "the job file's"


def test_a_lease_is_renewed_by_its_holder_alone_and_freed_by_its_holder_alone(
    client: redis.Redis, job_name: str
) -> None:
    one, other = SlotLeases(client, job_name, 1, ttl_s=600), SlotLeases(client, job_name, 1, ttl_s=600)
    assert one.take() == 0
    assert one.renew(0)
    assert not other.renew(0)
    other.release(0)
    assert other.take() is None
    one.release(0)
    assert other.take() == 0
    assert not one.renew(0)


def test_what_redis_has_forgotten_is_taken_again_unless_another_was_faster(client: redis.Redis, job_name: str) -> None:
    one, other = SlotLeases(client, job_name, 1, ttl_s=600), SlotLeases(client, job_name, 1, ttl_s=600)
    assert one.take() == 0
    client.delete(f"doll:{{{job_name}}}:slot:0")
    assert one.renew(0)
    assert other.take() is None
    client.delete(f"doll:{{{job_name}}}:slot:0")
    assert other.take() == 0
    assert not one.renew(0)


def test_a_spare_takes_over_when_a_holder_goes_without_a_word(client: redis.Redis, job_name: str) -> None:
    gone, kept = (SlotLeases(client, job_name, 2, ttl_s=600) for _ in range(2))
    assert (gone.take(), kept.take()) == (0, 1)
    client.pexpire(f"doll:{{{job_name}}}:slot:0", 100)  # the rest of a lease that nobody renews
    with lease_slot(config_of(job_name, 2, 600), client, threading.Event(), lambda: None) as held:
        assert held is not None
        assert held.number == 0


def test_a_holder_that_has_lost_its_slot_is_told_to_leave(client: redis.Redis, job_name: str) -> None:
    lost = threading.Event()
    with lease_slot(config_of(job_name, 1, 2), client, threading.Event(), lost.set) as held:
        assert held is not None
        held.start_renewing()
        client.set(f"doll:{{{job_name}}}:slot:0", b"another")
        assert lost.wait(WAIT_TIMEOUT_S)
        assert held.lost
    assert client.get(f"doll:{{{job_name}}}:slot:0") == b"another", "what is another's is left alone"


def test_the_first_lease_is_long_and_those_of_a_holder_that_works_are_not(client: redis.Redis, job_name: str) -> None:
    key = f"doll:{{{job_name}}}:slot:0"
    with lease_slot(config_of(job_name, 1, 5), client, threading.Event(), lambda: None) as held:
        assert held is not None
        assert client.pttl(key) > 20_000
        held.start_renewing()
        until(lambda: client.pttl(key) <= 5000, "a short lease")
    assert client.get(key) is None


def test_the_end_of_a_holder_frees_its_slot_at_once(client: redis.Redis, job_name: str) -> None:
    config = config_of(job_name, 1, 600)
    for _ in range(2):
        with lease_slot(config, client, threading.Event(), lambda: None) as held:
            assert held is not None
            assert held.number == 0


def test_a_spare_that_is_told_to_stop_has_no_slot(client: redis.Redis, job_name: str) -> None:
    assert SlotLeases(client, job_name, 1, ttl_s=600).take() == 0
    stop = threading.Event()
    timer = threading.Timer(0.1, stop.set)
    timer.start()
    with lease_slot(config_of(job_name, 1, 600), client, stop, lambda: None) as held:
        assert held is None
    timer.join()
