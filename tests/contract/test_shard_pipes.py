"""What every pipe between a server and a shard must do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
from doll.errors import ServiceUnavailableError
from doll.local.redis_server import LocalRedis
from doll.ps.shards import redis_pipes
from doll.ps.shards.pipes import ServerEnd, ShardEnd
from doll.ps.shards.redis_pipes import RedisServerEnd, RedisShardEnd, take_number
from doll.services import Services
from doll.storage.redis_client import connect_redis
from memory_shards import MemoryPipe, MemoryServerEnd, MemoryShardEnd
from waiting import WAIT_TIMEOUT_S

pytestmark = pytest.mark.slow  # starts a server, and loads torch


class Kit(NamedTuple):
    server: Callable[[str], ServerEnd]
    shard: Callable[[], ShardEnd]


@pytest.fixture(params=["memory", "redis"])
def kit(request: pytest.FixtureRequest) -> Kit:
    if request.param == "memory":
        pipe = MemoryPipe()
        return Kit(lambda name: MemoryServerEnd(pipe, name), lambda: MemoryShardEnd(pipe, "p1"))
    services = Services("", request.getfixturevalue("redis_server").address)

    def server(name: str) -> ServerEnd:
        return RedisServerEnd(connect_redis(services, retries=0), f"job:{id(request)}", 0, name)

    return Kit(server, lambda: RedisShardEnd(connect_redis(services, retries=0), f"job:{id(request)}", 0))


def test_a_shard_gets_the_begin_of_any_server_and_the_orders_of_its_own(kit: Kit) -> None:
    first, second, shard = kit.server("s1"), kit.server("s2"), kit.shard()
    first.begin(b"not taken")
    first.begin(b"begin 1")
    assert shard.receive("", 1.0) == b"begin 1"
    first.send(b"order 1")
    first.send(b"order 2")
    second.send(b"of another server")
    assert [shard.receive("s1", 1.0), shard.receive("s1", 1.0)] == [b"order 1", b"order 2"]
    second.begin(b"begin 2")
    first.send(b"order 3")
    assert shard.receive("s1", 1.0) == b"begin 2"
    assert shard.receive("s2", 1.0) == b"of another server"
    shard.close()


def test_answers_and_parts_go_to_the_server_that_is_named(kit: Kit) -> None:
    first, second, shard = kit.server("s1"), kit.server("s2"), kit.shard()
    shard.send("s1", b"answer")
    shard.send_part("s1", b"part")
    shard.send("s2", b"other")
    got: list[bytes | None] = []
    thread = threading.Thread(target=lambda: got.append(first.receive_part(1.0)))
    thread.start()
    assert first.receive(1.0) == b"answer"
    assert second.receive(1.0) == b"other"
    thread.join()
    assert got == [b"part"]
    shard.close()


def test_a_process_that_has_ended_is_not_alive(kit: Kit) -> None:
    server, shard = kit.server("s1"), kit.shard()
    shard.send("s1", b"answer")
    assert server.receive(1.0) == b"answer"
    assert server.mark(shard.process) is None, "it serves nobody yet"
    shard.serve("s1")
    mark = server.mark(shard.process)
    assert mark is not None
    assert mark.server == "s1"
    assert mark.host
    assert mark.pid
    assert server.mark("another") is None
    assert kit.server("s2").mark(shard.process) is None
    shard.close()
    assert server.mark(shard.process) is None


def test_a_mark_of_another_release_is_none(services_of_redis: Services) -> None:
    client = connect_redis(services_of_redis, retries=0)
    client.set(f"{redis_pipes._prefix('marks', 0)}:p:alive", b"s1")
    assert RedisServerEnd(client, "marks", 0, "s1").mark("p") is None


def test_an_end_without_redis_gets_an_error() -> None:
    server = RedisServerEnd(connect_redis(Services("", "redis://127.0.0.1:1"), retries=0), "job", 0, "s1")
    with pytest.raises(ServiceUnavailableError, match="through which server and shards send messages"):
        server.send(b"order")


def test_a_number_belongs_to_one_process_and_the_last_one_gets_it(services_of_redis: Services) -> None:
    client = connect_redis(services_of_redis, retries=0)
    assert [take_number(client, "numbers", 2, name) for name in ("a", "b", "c")] == [0, 1, None]
    first = RedisShardEnd(connect_redis(services_of_redis, retries=0), "numbers", 0, "a")
    second = RedisShardEnd(connect_redis(services_of_redis, retries=0), "numbers", 0, "d")
    first._thread.join(WAIT_TIMEOUT_S)  # it looks at most every 1.5 s
    assert (first.is_replaced, second.is_replaced) == (True, False)
    first.close()
    assert take_number(client, "numbers", 1, "e") is None
    second.close()
    assert take_number(client, "numbers", 1, "e") == 0


@pytest.fixture
def services_of_redis(redis_server: LocalRedis) -> Services:
    return Services("", redis_server.address)
