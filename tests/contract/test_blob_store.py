"""What every `Blobs` must do; then what only Redis can do (go away, come back, refuse), and only shared memory."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis
import structlog
from doll.errors import BlobError, ServiceUnavailableError
from doll.local.redis_server import LocalRedis
from doll.services import Services
from doll.storage import blobs as codec
from doll.storage import redis_blobs, shm_blobs
from doll.storage.blobs import Blobs
from doll.storage.redis_blobs import RedisBlobs
from doll.storage.redis_client import connect_redis
from doll.storage.shm_blobs import ShmBlobs
from doll.testing import MemoryBlobs
from waiting import until


def client_of(server: LocalRedis) -> redis.Redis:
    return connect_redis(Services("", server.address))


@pytest.fixture(params=["memory", "redis", "shm"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Blobs]:
    if request.param == "memory":
        yield MemoryBlobs()
        return
    if request.param == "shm":
        yield ShmBlobs(tmp_path / "blobs", limit_bytes=10**9, fallback=MemoryBlobs())
        return
    client = client_of(request.getfixturevalue("redis_server"))
    client.flushall()
    adapter = RedisBlobs(client)
    yield adapter
    adapter.close()


def test_stores_parts_joined_and_replaces(blobs: Blobs) -> None:
    blobs.put("a", [b"one", memoryview(b"two"), bytearray(b"")], 60)
    assert bytes(blobs.get("a") or b"") == b"onetwo"
    blobs.put("a", [b"new"], 60)
    assert bytes(blobs.get("a") or b"") == b"new"


def test_a_real_blob_survives(blobs: Blobs) -> None:
    array = np.random.default_rng(1).standard_normal(300_000).astype(np.float32)
    blobs.put("w", codec.encode_blob(array, job="j", kind="w", version=3), 60)
    data = blobs.get("w")
    assert data is not None
    np.testing.assert_array_equal(codec.decode_blob(data, job="j", kind="w", version=3, numel=array.size), array)


def test_values_are_binary_safe(blobs: Blobs) -> None:
    data = bytes(range(256)) + b"\r\n$3\r\n*1\r\n"
    blobs.put("key with spaces\r\nand breaks é", [data], 60)
    assert bytes(blobs.get("key with spaces\r\nand breaks é") or b"") == data


def test_delete_may_be_repeated(blobs: Blobs) -> None:
    blobs.put("a", [b"1"], 60)
    blobs.put("b", [b"2"], 60)
    blobs.delete("a", "b", "never there")
    blobs.delete("a")
    blobs.delete()
    assert blobs.get("a") is None


def test_expires(blobs: Blobs) -> None:
    blobs.put("short", [b"1"], 0.02)
    blobs.put("long", [b"2"], 60)
    until(lambda: blobs.get("short") is None, "the short one to expire")
    assert blobs.get("long") is not None


def test_refuses_a_blob_that_redis_cannot_hold(blobs: Blobs) -> None:
    part = bytes(codec.MAX_BLOB_BYTES // 4)
    with pytest.raises(BlobError, match=r"expected at most 500000000 bytes.*got 500000001"):
        blobs.put("big", [part, part, part, part, b"x"], 60)


def test_threads_share_it(blobs: Blobs) -> None:
    def work(number: int) -> None:
        value = bytes([number]) * 200_000
        for _ in range(20):
            blobs.put(f"t{number}", [b"head", memoryview(value)], 60)
            assert bytes(blobs.get(f"t{number}") or b"") == b"head" + value
        done.append(number)

    done: list[int] = []
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1, 2, 3]


# --- Redis only ---------------------------------------------------------------------------------------------------


@pytest.fixture
def events() -> Iterator[list[str]]:
    """Names of the events logged during the test."""
    with structlog.testing.capture_logs() as captured:
        names: list[Any] = captured
        yield names


class Pauses:
    """A `sleep` that does not sleep: records the pauses, and acts on the n-th one."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
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


def test_full_memory_is_an_error_and_leaves_the_connection_usable(own_redis: LocalRedis) -> None:
    store = RedisBlobs(client_of(own_redis))
    store.put("small", [b"1"], 60)
    with pytest.raises(ServiceUnavailableError, match="maxmemory"):
        store.put("large", [bytes(9_000_000)], 60)
    assert store.get("small") == b"1"


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


@pytest.mark.parametrize("reply", [b"$abc\r\n", b"$-2\r\n", b"$ 3\r\nabc\r\n", b"$500000001\r\n", b"*1\r\n", b":1\r\n"])
def test_a_garbled_reply_is_refused(reply: bytes) -> None:
    redis_end, our_end = socket.socketpair()
    with redis_end, our_end:
        redis_end.sendall(reply)
        with pytest.raises(redis.InvalidResponse, match="expected"):
            redis_blobs._read_value(SimpleNamespace(_sock=our_end))


# --- shared memory only -------------------------------------------------------------------------------------------


class Shm:
    """A store in a folder of its own, with its fallback and a clock."""

    def __init__(self, folder: Path, limit_bytes: int = 1000) -> None:
        self.folder = folder
        self.now_s = 100.0
        self.fallback = MemoryBlobs()
        self.store = ShmBlobs(folder, limit_bytes=limit_bytes, fallback=self.fallback, clock=lambda: self.now_s)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def shm(tmp_path: Path) -> Shm:
    return Shm(tmp_path / "blobs")


def test_shm_is_for_this_user_alone(shm: Shm) -> None:
    shm.store.put("a", [b"1"], 60)
    assert shm.folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in shm.folder.iterdir()] == [0o600]
    shm.folder.chmod(0o750)
    with pytest.raises(ServiceUnavailableError, match="nobody else may enter"):
        Shm(shm.folder)
    link = shm.folder.with_name("link")
    shm.folder.chmod(0o700)
    link.symlink_to(shm.folder)
    with pytest.raises(ServiceUnavailableError, match="nobody else may enter"):
        Shm(link)


@pytest.mark.parametrize("key", ["../up", "/etc/passwd", ".", "..", "", "x" * 5000, "a/b", "nul\0"])
def test_shm_keeps_every_key_inside_its_folder(shm: Shm, key: str) -> None:
    before = {path for path in shm.folder.parent.rglob("*") if shm.folder not in path.parents}
    shm.store.put(key, [b"here"], 60)
    assert bytes(shm.store.get(key) or b"") == b"here"
    assert {path for path in shm.folder.parent.rglob("*") if shm.folder not in path.parents} == before
    assert len(shm.files()) == 1
    shm.store.delete(key)
    assert shm.files() == []


def test_shm_sends_what_does_not_fit_beyond_and_finds_it_there(shm: Shm, events: list[Any]) -> None:
    shm.store.put("a", [bytes(600)], 60)
    shm.store.put("b", [bytes(600)], 60)
    shm.store.put("c", [bytes(1001)], 60)
    assert shm.fallback.keys() == ["b", "c"]
    assert [event["event"] for event in events] == ["shared_memory_full"]
    assert [len(shm.store.get(key) or b"") for key in "abc"] == [600, 600, 1001]
    shm.store.delete("a", "b", "c")
    assert [shm.store.get(key) for key in "abc"] == [None, None, None]
    shm.store.put("b", [bytes(600)], 60)  # there is room again
    assert shm.fallback.keys() == []


def test_shm_replaces_a_blob_that_no_longer_fits(shm: Shm) -> None:
    shm.store.put("a", [b"old"], 60)
    shm.store.put("a", [bytes(1001)], 60)
    assert len(shm.store.get("a") or b"") == 1001


def test_shm_removes_what_has_expired_and_what_a_dead_writer_left(shm: Shm) -> None:
    shm.store.put("short", [b"1"], 10)
    shm.store.put("long", [b"2"], 100)
    for name, age_s in ((".new-dead", 3600), (".new-alive", 0)):
        (shm.folder / name).write_bytes(b"half")
        os.utime(shm.folder / name, (time.time() - age_s,) * 2)
    shm.now_s += 50
    assert shm.store.get("short") is None
    shm.store.put("next", [b"3"], 100)
    assert len(shm.files()) == 3
    assert ".new-alive" in shm.files()
    assert bytes(shm.store.get("long") or b"") == b"2"


def test_shm_that_was_wiped_is_empty_and_goes_on(shm: Shm) -> None:
    shm.store.put("a", [b"1"], 60)
    held = shm.store.get("a")
    for path in shm.folder.iterdir():
        path.unlink()
    shm.folder.rmdir()
    assert shm.store.get("a") is None
    assert bytes(held or b"") == b"1"  # whoever reads it has it
    shm.store.put("a", [b"2"], 60)
    assert bytes(shm.store.get("a") or b"") == b"2"
    assert shm.folder.stat().st_mode & 0o777 == 0o700
    assert shm.fallback.keys() == []


def test_shm_that_was_wiped_and_has_no_memory_left_sends_it_beyond(shm: Shm, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(descriptor: int, parts: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shm_blobs, "_write_all", no_memory)
    shm.folder.rmdir()
    shm.store.put("a", [b"1"], 60)
    assert shm.fallback.keys() == ["a"]
    assert shm.files() == []
    assert bytes(shm.store.get("a") or b"") == b"1"


def test_shm_refuses_a_torn_blob_as_any_store(shm: Shm) -> None:
    big = Shm(shm.folder, 10**6)
    big.store.put("w", codec.encode_blob(np.ones(100, np.float32), job="j", kind="w", version=3), 60)
    (path,) = shm.folder.iterdir()
    with path.open("r+b") as file:
        file.seek(200)
        file.write(b"!")
    os.utime(path, ns=(0, 10**18))
    data = big.store.get("w")
    assert data is not None
    with pytest.raises(BlobError, match="the body's checksum does not match"):
        codec.decode_blob(data, job="j", kind="w", version=3, numel=100)
