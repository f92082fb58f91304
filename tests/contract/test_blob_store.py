"""What every `Blobs` must do; then what only Redis can do (go away, come back, refuse), and only shared memory."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
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
from memory_stores import MemoryBlobs
from paths import SUPPORT
from waiting import until

pytestmark = pytest.mark.slow  # starts servers


def client_of(server: LocalRedis) -> redis.Redis:
    return connect_redis(Services("", server.address))


@pytest.fixture(params=["memory", "redis", "shm", "shm, files used again", "shm, files used again and mapped"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Blobs]:
    if request.param == "memory":
        yield MemoryBlobs()
        return
    if "shm" in request.param:
        reused_from = 1 if "again" in request.param else 1 << 20
        mapped_from = 1 if "mapped" in request.param else 1 << 20
        store = ShmBlobs(
            tmp_path / "blobs", limit_bytes=10**9, fallback=MemoryBlobs(), reused_from_bytes=reused_from,
            mapped_from_bytes=mapped_from,
        )  # fmt: skip
        yield store
        store.close()
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


def test_what_is_put_from_reserved_memory_is_what_was_in_it(blobs: Blobs) -> None:
    """And later puts do not change what a reader holds."""
    held = []
    for number in range(1, 8):
        value = bytes([number]) * 3000
        memory = blobs.reserve(len(value))
        if memory is not None:
            memory[:] = value
        blobs.put("a", [value if memory is None else memory], 60)
        held.append((value, memory, blobs.get("a")))
        blobs.put("b", [value[:1000], value[1000:]], 60)
        held.append((value, None, blobs.get("b")))
        blobs.delete("a", *["b"] * (number % 2))
    for value, memory, got in held:
        assert bytes(got or b"") == value
        assert memory is None or bytes(memory) == value


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


def test_shm_lets_the_other_store_take_a_blob_when_its_folder_does_not_stay(
    shm: Shm, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir

    def make_and_lose(path: str, mode: int) -> None:
        make(path, mode)
        os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", make_and_lose)
    shm.folder.rmdir()
    for size in (3, 100_000):
        shm.store.put("a", [bytes(size)], 60)
        assert len(shm.store.get("a") or b"") == size
    assert shm.fallback.keys() == ["a"]


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


# --- files that are used again --------------------------------------------------------------------------------------


class Reused(Shm):
    """Every blob is in such a file. `reader` is another process's store of the same folder."""

    def __init__(self, folder: Path, limit_bytes: int = 10_000) -> None:
        super().__init__(folder, limit_bytes)
        self.store = self.another(limit_bytes)
        self.reader = self.another(limit_bytes)

    def another(self, limit_bytes: int = 10_000) -> ShmBlobs:
        return ShmBlobs(
            self.folder,
            limit_bytes=limit_bytes,
            fallback=self.fallback,
            clock=lambda: self.now_s,
            reused_from_bytes=1,
            mapped_from_bytes=1,
        )

    def inodes(self) -> set[int]:
        return {path.stat().st_ino for path in self.folder.iterdir()}


@pytest.fixture
def reused(tmp_path: Path) -> Reused:
    return Reused(tmp_path / "blobs")


def test_a_file_is_used_again_when_its_blob_is_deleted_and_not_before(reused: Reused) -> None:
    for number in range(20):
        reused.store.put("a", [bytes([number]) * 1000], 60)
        assert bytes(reused.reader.get("a") or b"") == bytes([number]) * 1000
        reused.reader.delete("a")
    assert len(reused.inodes()) == 1
    reused.store.put("a", [b"1" * 1000], 60)
    reused.store.put("b", [b"2" * 1000], 60)
    assert len(reused.inodes()) == 2
    assert [bytes(reused.reader.get(key) or b"")[:1] for key in "ab"] == [b"1", b"2"]


def test_a_blob_that_is_read_is_not_written_over_though_it_is_deleted(reused: Reused) -> None:
    reused.store.put("a", [b"1" * 1000], 60)
    view = reused.reader.get("a")
    part = np.frombuffer(view, np.uint8)[10:20]  # type: ignore[arg-type]
    reused.store.delete("a")
    reused.store.put("b", [b"2" * 1000], 60)
    assert bytes(view or b"") == b"1" * 1000
    assert len(reused.inodes()) == 2
    del view
    reused.store.delete("b")
    for key in "cde":
        reused.store.put(key, [b"3" * 1000], 60)
    assert part.tobytes() == b"1" * 10, "a part of it is held"
    assert len(reused.inodes()) == 4
    del part
    reused.store.put("f", [b"4" * 1000], 60)
    assert len(reused.inodes()) == 4


def test_a_file_that_was_cut_short_is_no_blob_and_is_not_used_again(reused: Reused) -> None:
    """Its mapping is longer than it: reading or writing behind its end would kill the process."""
    reused.store.put("a", [b"1" * 10_000], 60)
    assert reused.reader.get("a") is not None  # mapped
    for path in reused.folder.iterdir():
        os.truncate(path, 100)
    assert reused.reader.get("a") is None
    reused.store.delete("a")
    reused.store.put("a", [b"2" * 10_000], 60)
    assert bytes(reused.reader.get("a") or b"") == b"2" * 10_000


def test_a_reader_that_comes_too_late_finds_no_blob(reused: Reused, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its look at the name and its lock, the file may have got another blob."""
    flock = fcntl.flock

    def owner_was_faster(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        reused.store.delete("a")
        reused.store.put("b", [b"2" * 1000], 60)
        flock(descriptor, operation)

    reused.store.put("a", [b"1" * 1000], 60)
    monkeypatch.setattr(fcntl, "flock", owner_was_faster)
    assert reused.reader.get("a") is None
    assert len(reused.inodes()) == 1
    assert bytes(reused.reader.get("b") or b"") == b"2" * 1000


def test_a_blob_that_is_replaced_while_it_is_looked_up_is_found(
    reused: Reused, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def owner_was_faster(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        reused.store.put("a", [b"2" * 1000], 60)
        flock(descriptor, operation)

    reused.store.put("a", [b"1" * 1000], 60)
    monkeypatch.setattr(fcntl, "flock", owner_was_faster)
    assert bytes(reused.reader.get("a") or b"") == b"2" * 1000


def test_reserved_memory_is_not_copied_and_not_lent_twice(reused: Reused) -> None:
    one, other = reused.store.reserve(1000), reused.store.reserve(1000)
    assert one is not None
    assert other is not None
    one[:], other[:] = b"1" * 1000, b"2" * 1000
    files = reused.inodes()
    reused.store.put("a", [one], 60)
    assert reused.inodes() == files
    assert bytes(reused.reader.get("a") or b"") == b"1" * 1000
    reused.store.delete("a")
    third = reused.store.reserve(1000)
    assert third is not None
    third[:] = b"3" * 1000
    assert (bytes(one), bytes(other)) == (b"1" * 1000, b"2" * 1000), "both are still held"
    del one, third
    reused.store.reserve(1000)
    assert len(reused.inodes()) == 3


@pytest.mark.parametrize("folder_too", [False, True])
def test_a_wiped_folder_loses_blobs_and_no_process(reused: Reused, folder_too: bool) -> None:
    memory = reused.store.reserve(1000)
    assert memory is not None
    memory[:] = b"m" * 1000
    reused.store.put("a", [b"1" * 1000], 60)
    held = reused.reader.get("a")
    for path in reused.folder.iterdir():
        path.unlink()
    if folder_too:
        reused.folder.rmdir()
    assert reused.reader.get("a") is None
    assert bytes(held or b"") == b"1" * 1000
    reused.store.put("m", [memory], 60)
    assert bytes(reused.reader.get("m") or b"") == b"m" * 1000
    reused.store.put("a", [b"2" * 1000], 60)
    assert bytes(reused.reader.get("a") or b"") == b"2" * 1000
    assert reused.fallback.keys() == []


def test_the_limit_counts_a_file_once_and_frees_what_waits_to_be_used_again(reused: Reused) -> None:
    for key in "abcde":
        reused.store.put(key, [bytes(1900)], 60)
    assert reused.fallback.keys() == []
    assert reused.store.reserve(1900) is None
    reused.store.put("f", [bytes(1900)], 60)
    assert reused.fallback.keys() == ["f"]
    reused.store.delete("a", "b")
    reused.store.put("g", [bytes(3800)], 60)  # of another size
    assert reused.fallback.keys() == ["f"]
    assert len(reused.inodes()) == 4


def test_without_memory_a_blob_goes_beyond(reused: Reused, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert reused.store.reserve(1000) is None
    reused.store.put("a", [b"1" * 1000], 60)
    assert reused.fallback.keys() == ["a"]
    assert bytes(reused.reader.get("a") or b"") == b"1" * 1000
    assert reused.files() == []


def test_without_memory_for_a_name_what_was_reserved_goes_beyond(
    reused: Reused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tmpfs each name counts as a file, and their number is limited."""
    memory = reused.store.reserve(1000)
    assert memory is not None
    memory[:] = b"1" * 1000

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    reused.store.put("a", [memory], 60)
    assert reused.fallback.keys() == ["a"]
    assert bytes(reused.reader.get("a") or b"") == b"1" * 1000


def test_what_a_dead_owner_left_is_removed_and_its_blobs_expire(reused: Reused) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for key in "ab":
        reused.store.put(key, [b"1" * 1000], 60)
    for number, path in enumerate(sorted(reused.folder.glob(".segment-*"))):
        path.rename(reused.folder / f".segment-{dead.pid}-{number}")
    reused.store.delete("a")
    reused.now_s += 2
    reader = reused.another()
    reader.put("c", [b"2" * 1000], 60)
    assert len(reused.inodes()) == 2
    assert bytes(reader.get("b") or b"") == b"1" * 1000
    reused.now_s += 70
    assert reader.get("b") is None
    reader.put("d", [b"2" * 1000], 60)
    assert len(reused.inodes()) == 1


def test_a_reader_forgets_the_files_that_are_gone(reused: Reused) -> None:
    def memory() -> int:
        return Path("/proc/self/maps").read_text().count(str(reused.folder))

    before = memory()
    for number in range(100):
        owner = reused.another()
        owner.put("a", [bytes([number]) * 1000], 60)
        assert bytes(reused.reader.get("a") or b"") == bytes([number]) * 1000
        owner.delete("a")
        owner.close()
    assert memory() <= before + 2


WRITER = """
import sys
from pathlib import Path
from doll.storage.shm_blobs import ShmBlobs
from memory_stores import MemoryBlobs
store = ShmBlobs(Path(sys.argv[1]), limit_bytes=10**9, fallback=MemoryBlobs(), reused_from_bytes=1, mapped_from_bytes=1)
for number in range(int(sys.argv[2])):
    memory = store.reserve(200_000) if number % 3 else None
    value = bytes([number % 251]) * 200_000
    if memory is not None:
        memory[:] = value
    store.put(f"k{number % 4}", [value if memory is None else memory], 60)
    if number % 5 == 0:
        store.delete(f"k{(number + 1) % 4}")
store.put("done", [b"1"], 60)
"""


@pytest.mark.parametrize("mapped_from_bytes", [1, 1 << 30])
def test_readers_beside_a_writer_never_see_bytes_change(tmp_path: Path, mapped_from_bytes: int) -> None:
    """Torn or changed: a value of which not all bytes are equal, or which is another one when it is read again."""
    folder = tmp_path / "blobs"
    store = ShmBlobs(
        folder, limit_bytes=10**9, fallback=MemoryBlobs(), reused_from_bytes=1, mapped_from_bytes=mapped_from_bytes
    )
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder), "1500"], env=environment)
    read = 0
    try:
        while store.get("done") is None:
            assert writer.poll() in (None, 0)
            for number in range(4):
                value = store.get(f"k{number}")
                if value is None:
                    continue
                array = np.frombuffer(value, np.uint8)
                first = int(array[0])
                assert (array == first).all()
                assert (array == first).all()
                read += 1
    finally:
        writer.wait()
    assert read > 0
    assert len({path.stat().st_ino for path in folder.iterdir()}) < 12


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
