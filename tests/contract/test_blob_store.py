"""What every `Blobs` must do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import memory_stores
import numpy as np
import pytest
import redis
from doll.errors import BlobError
from doll.local.redis_server import LocalRedis
from doll.model.slices import BLOCK, sliced
from doll.services import Services
from doll.storage import blobs as codec
from doll.storage import redis_blobs, shm_blobs
from doll.storage.blobs import Blobs
from doll.storage.redis_blobs import SECTION_BYTES, RedisBlobs
from doll.storage.redis_client import connect_redis
from doll.storage.sharded_blobs import ShardedBlobs
from doll.storage.shm_blobs import ShmBlobs
from doll.storage.slice_blobs import SliceBlobs
from memory_stores import MemoryBlobs
from waiting import until

pytestmark = pytest.mark.slow  # starts servers


def client_of(server: LocalRedis) -> redis.Redis:
    return connect_redis(Services("", server.address))


@pytest.fixture(
    params=[
        "memory", "redis", "redis, in sections", "redis of a shard", "shm", "shm, files used again",
        "shm, files used again and mapped",
    ]
)  # fmt: skip
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
    if "shard" in request.param:
        url = request.getfixturevalue("redis_server").address.removesuffix("0")
        stores = [RedisBlobs(connect_redis(Services("", f"{url}{db}"))) for db in range(3)]
        sharded = ShardedBlobs(stores[0], stores[1:])
        yield SliceBlobs(sharded, sliced(2 * BLOCK, 2 * BLOCK, 2 * BLOCK, 2), 1)
        assert not list(client.scan_iter()), "the blobs of a shard are in its own Redis"
        sharded.close()
        client.close()
        return
    adapter = RedisBlobs(client, section_bytes=1000 if "sections" in request.param else SECTION_BYTES)
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


def test_refuses_a_blob_above_the_limit(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory_stores, redis_blobs, shm_blobs):
        monkeypatch.setattr(module, "MAX_BLOB_BYTES", 400)
    part = bytes(100)
    blobs.put("big", [part] * 4, 60)
    with pytest.raises(BlobError, match=r"expected at most 400 bytes.*got 401"):
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
