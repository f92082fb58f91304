"""What a control link by Redis streams does besides the contract: trimming, lost entries, restarts, `auto`."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from control_rig import ON_REDIS, SESSION, TERM, Rig, Server, Worker, grant, push, run, welcome
from doll.consumers.channels.control_link import ControlLink
from doll.control.link_state import MAX_FRAME_BYTES, TO_WORKER, LinkState
from doll.control.redis_streams import server_stream
from doll.local.redis_server import LocalRedis
from doll.ps.channels.stream_listener import StreamListener
from doll.records.control import (
    encode,
)
from doll.services import Services
from doll.storage.redis_client import connect_redis

pytestmark = pytest.mark.slow  # starts servers


@ON_REDIS
def test_streams_are_trimmed_expire_and_are_gone_with_their_ends(rig: Rig, redis_client: Any) -> None:
    server, worker = rig.start_server(), rig.worker()
    name = server_stream("contract", TERM)

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        for number in range(500):
            worker.link.send(push(number))
            server.links.send(0, grant(number))
        await until(lambda: len(server.records) == len(worker.records) == 500)
        keys = [key.decode() for key in redis_client.keys(f"{name}*")]
        assert len(keys) == 2
        assert all(0 < redis_client.ttl(key) <= 60 for key in keys)
        await until(lambda: all(redis_client.xlen(key) <= 3 for key in keys))

    run(scenario, worker, server)
    rig.close()
    assert redis_client.keys(f"{name}*") == []


@ON_REDIS
@pytest.mark.parametrize(
    "damage", ["wipe", "server_stream", "other_type", "lost_entry", "foreign_entry", "garbled_entry"]
)
def test_a_redis_that_loses_entries_breaks_the_link_which_comes_back(rig: Rig, redis_client: Any, damage: str) -> None:
    server, worker = rig.start_server(), rig.worker()
    name = server_stream("contract", TERM)

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        link = next(key for key in redis_client.keys(f"{name}:*"))
        match damage:
            case "wipe":
                redis_client.flushall()
            case "server_stream":
                redis_client.delete(name)
            case "lost_entry":  # as a failover to a replica that lags
                state = LinkState(TO_WORKER, 0.0)
                for _ in range(5):
                    frame = state.pack(grant(1), 0.0)
                redis_client.xadd(link, {"f": frame})
            case "other_type":  # the server's stream has become a string
                redis_client.set(name, b"text")
            case "garbled_entry":
                redis_client.xadd(link, {"f": b"\0\0\0\1\xff\xff"})
            case "foreign_entry":
                redis_client.xadd(link, {"what": "ever"})
        await until(lambda: worker.changes == ["redis", "kafka", "redis"])
        assert server.changed[:3] == [0, 0, 0]
        assert worker.link.send(push(7))
        await until(lambda: server.records == [push(7)])

    run(scenario, worker, server)


@ON_REDIS
def test_a_foreign_entry_for_the_server_is_counted_and_harms_no_link(rig: Rig, redis_client: Any) -> None:
    server, worker = rig.start_server(), rig.worker()
    name = server_stream("contract", TERM)

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        redis_client.xadd(name, {"what": "ever"})
        redis_client.xadd(name, {"l": "unknown", "f": b"\0\0\0\0" + encode(push(1))})
        redis_client.xadd(name, {"l": "../etc", "f": b""})
        redis_client.xadd(name, {"": ""})  # as the entry that a stream begins with
        redis_client.xadd(name, {"l": "x" * 65, "f": b""})
        redis_client.xadd(name, {"l": "unknown", "f": bytes(MAX_FRAME_BYTES + 1)})
        await until(lambda: server.links.counters["control_refused"] == 4)
        assert worker.link.send(push(7))
        await until(lambda: server.records == [push(7)])
        assert worker.changes == ["redis"]

    run(scenario, worker, server)


def test_a_redis_that_restarts_empty_breaks_all_links_and_they_come_back(own_redis: LocalRedis) -> None:
    rig = Rig("redis", Services("", own_redis.address), Path())
    server, worker = rig.start_server(), rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        own_redis.kill()
        await until(lambda: worker.changes[-1] == "kafka" and server.links.kinds() == {})
        own_redis.start()
        await until(lambda: worker.changes[-1] == "redis")
        assert worker.link.send(push(7))
        await until(lambda: server.records == [push(7)])

    with closing(rig):
        run(scenario, worker, server)


def test_auto_takes_the_socket_then_redis_and_goes_back(redis_server: LocalRedis, private: Path) -> None:
    services = Services("", redis_server.address)
    rig = Rig("local", services, private / "s")
    server, worker = rig.start_server(), Worker(ControlLink(services, "auto"))
    server.links.add(StreamListener(server.links, services, "contract", TERM, max_links=8))

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        assert worker.changes == ["local"]
        os.rename(private / "s", private / "away")
        server.links.welcome(welcome(session=SESSION + 1))
        server.links.welcome(welcome())
        await until(lambda: worker.changes == ["local", "kafka", "redis"])
        os.rename(private / "away", private / "s")
        await until(lambda: worker.changes[3:] == ["local"])

    with closing(rig):
        run(scenario, worker, server)


def test_a_redis_that_takes_connections_and_refuses_commands_is_asked_with_pauses(own_redis: LocalRedis) -> None:
    services = Services("", own_redis.address)
    client: Any = connect_redis(services)
    client.execute_command("ACL", "SETUSER", "default", "-xread")
    before = client.info()["total_connections_received"]
    server = Server("redis", services, Path())
    until_s = time.monotonic() + 1.2
    while time.monotonic() < until_s:
        server.poll()
    server.links.close()
    # Two connections at 0, 0.5 and 1.5 s. Without a pause there were thousands.
    assert 2 <= client.info()["total_connections_received"] - before <= 6
    client.close()


def test_a_redis_that_nobody_serves_is_waited_for(nowhere: Services) -> None:
    server = Server("redis", nowhere, Path())
    server.poll()
    server.links.close()
    with pytest.raises(redis.ConnectionError):
        connect_redis(nowhere, retries=0).ping()
