"""What a blob store in Redis does besides the contract: Redis goes away, comes back, refuses; values are read ahead."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis
from doll.errors import ServiceUnavailableError
from doll.local.redis_server import LocalRedis
from doll.services import Services
from doll.storage import blobs as codec
from doll.storage import redis_blobs
from doll.storage.redis_blobs import RedisBlobs
from doll.storage.redis_client import connect_redis, is_temporary
from redis._parsers.base import BaseParser

pytestmark = pytest.mark.slow  # starts servers


def client_of(server: LocalRedis) -> redis.Redis:
    return connect_redis(Services("", server.address))


class Pauses:
    """A `sleep` that does not sleep: records the pauses, and acts on the n-th one."""

    def __init__(self, at: int, act: Callable[[], object]) -> None:
        self.taken_s: list[float] = []
        self._at, self._act = at, act

    def __call__(self, pause_s: float) -> None:
        self.taken_s.append(pause_s)
        if len(self.taken_s) == self._at:
            self._act()


def test_waits_until_redis_is_back_and_says_so_once(own_redis: LocalRedis, events: list[Any]) -> None:
    pauses = Pauses(6, own_redis.start)
    store = RedisBlobs(client_of(own_redis), sleep=pauses)
    store.put("a", [b"1"], 60)
    own_redis.kill()
    assert store.get("a") is None  # a cache: what it held is gone
    assert [event["event"] for event in events] == ["redis_unavailable", "redis_available"]
    assert pauses.taken_s == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8]
    store.put("a", [b"2"], 60)
    assert store.get("a") == b"2"


def test_a_connection_that_died_idle_is_replaced_silently(own_redis: LocalRedis, events: list[Any]) -> None:
    store = RedisBlobs(client_of(own_redis))
    store.put("a", [b"1"], 60)
    own_redis.kill()
    own_redis.start()
    store.put("a", [b"2"], 60)
    assert store.get("a") == b"2"
    assert events == []


def test_gives_up_when_told(own_redis: LocalRedis) -> None:
    stopping = threading.Event()
    store = RedisBlobs(client_of(own_redis), give_up=stopping.is_set, sleep=Pauses(3, stopping.set))
    own_redis.kill()
    for call in (lambda: store.get("a"), lambda: store.put("a", [b"1"], 60), lambda: store.delete("a")):
        with pytest.raises(
            ServiceUnavailableError, match=r"Redis is unreachable .* start it, or correct redis\.address"
        ):
            call()


def test_a_value_above_the_memory_is_an_error_and_leaves_the_connection_usable(own_redis: LocalRedis) -> None:
    store = RedisBlobs(client_of(own_redis), sleep=lambda _: pytest.fail("must not wait"))
    store.put("small", [b"1"], 60)
    with pytest.raises(ServiceUnavailableError, match="expected a maxmemory above the 9000000 bytes of one value"):
        store.put("large", [bytes(9_000_000)], 60)
    assert store.get("small") == b"1"


def test_waits_while_redis_is_full_and_says_what_to_do(own_redis: LocalRedis, events: list[Any]) -> None:
    client = client_of(own_redis)
    most = str(client.config_get("maxmemory")["maxmemory"])
    client.config_set("maxmemory", 1)  # what is there takes more
    store = RedisBlobs(client_of(own_redis), sleep=Pauses(4, lambda: client.config_set("maxmemory", most)))
    store.put("a", [b"1"], 60)
    assert store.get("a") == b"1"
    assert [event["event"] for event in events] == ["redis_unavailable", "redis_available"]
    assert "raise its maxmemory" in events[0]["hint"]
    client.config_set("maxmemory", 1)
    store = RedisBlobs(client_of(own_redis), sleep=lambda _: None, give_up=iter([False, True]).__next__)
    with pytest.raises(ServiceUnavailableError, match=r"Redis takes no values \(.*maxmemory.*raise its maxmemory"):
        store.put("b", [b"1"], 60)
    assert store.get("a") == b"1", "what is there can be read"


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", True), ("READONLY You can't write", True),
        ("LOADING Redis is loading the dataset in memory", True), ("MISCONF Redis is configured to save RDB", True),
        ("NOREPLICAS Not enough good replicas to write.", True), ("BUSY Redis is busy running a script.", True),
        ("CLUSTERDOWN The cluster is down", True), ("ERR max number of clients reached", True),
        ("NOAUTH Authentication required.", False), ("NOPERM No permissions", False),
        ("ERR unknown command 'SET'", False), ("WRONGTYPE Operation against a key", False),
    ],
)  # fmt: skip
def test_what_redis_refuses_for_a_while_is_waited_for(text: str, does: bool) -> None:
    assert is_temporary(BaseParser.parse_error(text)) is does


def test_a_refused_log_in_is_an_error_without_the_password(own_redis: LocalRedis) -> None:
    client_of(own_redis).config_set("requirepass", "right")
    for client in (client_of(own_redis), redis.Redis.from_url(own_redis.address, password="wr0ng-secret")):
        with pytest.raises(ServiceUnavailableError, match="DOLL_REDIS_PASSWORD") as caught:
            RedisBlobs(client, sleep=lambda _: pytest.fail("must not wait")).get("a")
        assert "wr0ng-secret" not in str(caught.value)


def test_speed_of_a_4_8_mb_blob(redis_server: LocalRedis) -> None:
    """Loose bounds, a hundred times the measured 1.5 ms: they catch a packer or parser that copies byte by byte."""
    array = np.random.default_rng(1).standard_normal(1_200_000).astype(np.float32)
    parts = codec.encode_blob(array, job="j", kind="w", version=1)
    store = RedisBlobs(client_of(redis_server))
    puts_s, gets_s = [], []
    for _ in range(15):
        start_s = time.perf_counter()
        store.put("w", parts, 60)
        middle_s = time.perf_counter()
        assert store.get("w") is not None
        puts_s.append(middle_s - start_s)
        gets_s.append(time.perf_counter() - middle_s)
    assert min(puts_s) < 0.15
    assert min(gets_s) < 0.15


@pytest.mark.parametrize("reply", [b"$abc\r\n", b"$-2\r\n", b"$ 3\r\nabc\r\n", b"$536870913\r\n", b"*1\r\n", b":1\r\n"])
def test_a_garbled_reply_is_refused(reply: bytes) -> None:
    redis_end, our_end = socket.socketpair()
    with redis_end, our_end:
        redis_end.sendall(reply)
        with pytest.raises(redis.InvalidResponse, match="expected"):
            redis_blobs._read_value(SimpleNamespace(_sock=our_end))


def test_what_is_read_ahead_is_returned_once_and_forgotten_when_it_changes(own_redis: LocalRedis) -> None:
    store = RedisBlobs(client_of(own_redis))
    keys = [f"k{n}" for n in range(40)]
    values = {key: bytes([n]) * (n * n * 50) for n, key in enumerate(keys)}  # 0 to 76,050 bytes: several in one packet
    for key, value in values.items():
        store.put(key, [value], 60)
    del values["k3"], values["k7"]
    store.delete("k3", "k7")
    store.prefetch(keys)
    store.put("k9", [b"new"], 60)
    store.delete("k11")
    own_redis.kill()
    own_redis.start()
    expected = {**values, "k9": None, "k11": None, "k3": None, "k7": None}  # Redis has lost everything
    read = {key: store.get(key) for key in keys}
    assert {key: None if value is None else bytes(value) for key, value in read.items()} == expected
    assert store.get("k1") is None
    store.close()


def test_what_was_read_ahead_and_not_asked_for_is_dropped(own_redis: LocalRedis) -> None:
    store = RedisBlobs(client_of(own_redis))
    store.put("a", [b"1"], 60)
    store.put("b", [b"2"], 60)
    store.prefetch(["a", "b"])
    store.prefetch(["b"])
    own_redis.kill()
    store.prefetch(["b"])  # a hint: it does not wait
    own_redis.start()
    assert store.get("a") is None
    assert store.get("b") is None
    store.close()


def test_a_near_store_has_what_it_is_given_at_once(own_redis: LocalRedis) -> None:
    store = RedisBlobs(client_of(own_redis))
    store.put("a", [b"1"], 60)
    store.put("a", [b"2"], 60)
    assert not store.is_far
    assert store.put_soon("b", [b"3"], 60)
    assert bytes(store.get("b") or b"") == b"3"
    store.close()


def test_a_far_store_stores_while_its_caller_goes_on(own_redis: LocalRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RedisBlobs, "is_far", True)
    store, reader = RedisBlobs(client_of(own_redis)), RedisBlobs(client_of(own_redis))
    begun, go = threading.Event(), threading.Event()
    put = store.put

    def late_put(*arguments: Any) -> None:
        begun.set()
        assert go.wait(30)
        put(*arguments)

    monkeypatch.setattr(store, "put", late_put)
    assert not store.put_soon("k", [b"v"], 60)
    assert begun.wait(30)
    assert reader.get("k") is None
    monkeypatch.setattr(reader, "_sleep", lambda _: go.set())  # it is not there yet: ask again
    assert bytes(reader.get_soon("k") or b"") == b"v"
    store.settle()
    monkeypatch.setattr(redis_blobs, "SOON_S", 0.0)
    assert reader.get_soon("lost") is None
    store.close()
    reader.close()


def test_what_could_not_be_stored_is_said_when_it_is_settled(
    own_redis: LocalRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RedisBlobs, "is_far", True)
    store = RedisBlobs(client_of(own_redis), give_up=lambda: True)
    own_redis.kill()
    store.put_soon("k", [b"v"], 60)
    with pytest.raises(ServiceUnavailableError, match="unreachable"):
        store.settle()
    store.settle()  # once
    store.close()
    own_redis.start()


def test_a_large_blob_is_stored_in_sections_all_or_none(own_redis: LocalRedis) -> None:
    client = client_of(own_redis)
    store, other = (RedisBlobs(client_of(own_redis), section_bytes=1000) for _ in range(2))
    value = np.random.default_rng(0).bytes(3_500)
    store.put("doll:{j}:w", [value[:1_200], memoryview(value)[1_200:3_400], bytearray(value[3_400:])], 60)
    assert sorted(client.keys()) == [b"doll:{j}:w", *(b"doll:{j}:w#%d" % number for number in range(4))]
    assert [client.strlen(f"doll:{{j}}:w#{number}") for number in range(4)] == [1000, 1000, 1000, 500]
    assert 0 < client.pttl("doll:{j}:w#3") <= 60_000
    other.prefetch(["doll:{j}:w"])
    assert other.get("doll:{j}:w") == value
    client.delete("doll:{j}:w#2")
    assert other.get("doll:{j}:w") is None, "a section has expired"
    client.set("doll:{j}:w#2", bytes(1_001))
    assert other.get("doll:{j}:w") is None, "a section of another blob"
    other.delete("doll:{j}:w")
    assert client.keys() == []
    store.put("doll:{j}:w", [value[:900]], 60)
    assert other.get("doll:{j}:w") == value[:900], "small again"
    store.close()
    other.close()


def test_an_index_that_nobody_can_have_written_is_no_blob(own_redis: LocalRedis) -> None:
    client, store = client_of(own_redis), RedisBlobs(client_of(own_redis))
    for count, size in ((3, 1 << 62), (1 << 31, 100), (0, 100)):
        client.set("a", struct.pack("<4sIQ", b"DLBS", count, size))
        assert store.get("a") is None
    store.close()


def test_the_sections_of_a_blob_above_the_memory_are_an_error(own_redis: LocalRedis) -> None:
    store = RedisBlobs(client_of(own_redis), sleep=lambda _: pytest.fail("must not wait"), section_bytes=1_000_000)
    with pytest.raises(ServiceUnavailableError, match="expected a maxmemory above the 20000000 bytes of one value"):
        store.put("large", [bytes(20_000_000)], 60)
    store.close()


def test_a_blob_in_sections_is_stored_before_it_is_announced(own_redis: LocalRedis) -> None:
    store = RedisBlobs(client_of(own_redis), section_bytes=1000)
    store._took_s.append(1.0)
    assert store.is_far
    assert store.put_soon("doll:{j}:g", [bytes(2_500)], 60)
    assert client_of(own_redis).exists("doll:{j}:g")
    store._took_s.clear()
    store._took_s.append(1.0)
    assert not store.put_soon("doll:{j}:small", [bytes(500)], 60)
    store.close()
