"""The slices of one vector: read and stored at once where each has its own server, otherwise in their order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from doll.errors import BlobError, ServiceUnavailableError
from doll.model.slices import BLOCK, sliced
from doll.storage.blobs import Blobs, Buffer, encode_blob
from doll.storage.redis_blobs import RedisBlobs
from doll.storage.sharded_blobs import ShardedBlobs
from doll.storage.slice_blobs import put_slices, read_weights
from memory_stores import MemoryBlobs
from waiting import WAIT_TIMEOUT_S

SLICES = sliced(3 * BLOCK, 3 * BLOCK, 3 * BLOCK, 3)
KEYS = SLICES.keys("k")
WEIGHTS = np.arange(SLICES.numel, dtype=np.float32)
PARTS = [encode_blob(part.view(WEIGHTS), job="j", kind="w", version=1) for part in SLICES]


class Together(MemoryBlobs):
    """A store whose calls end when all servers have one."""

    def __init__(self, all_called: threading.Barrier, problem: Exception | None = None) -> None:
        super().__init__()
        self._all_called, self._problem = all_called, problem
        self.ended = False

    def _together(self) -> None:
        self._all_called.wait(WAIT_TIMEOUT_S)
        self.ended = True
        if self._problem is not None:
            raise self._problem

    def put(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> None:
        self._together()
        super().put(key, parts, ttl_s)

    def get(self, key: str) -> bytes | None:
        self._together()
        return super().get(key)


def sharded(*problems: Exception | None) -> tuple[ShardedBlobs, list[Together]]:
    barrier = threading.Barrier(3)
    servers = [Together(barrier, problem) for problem in problems]
    return ShardedBlobs(cast(RedisBlobs, MemoryBlobs()), cast(list[RedisBlobs], servers)), servers


@pytest.mark.parametrize("soon", [False, True])
def test_servers_of_shards_work_at_the_same_time(soon: bool) -> None:
    blobs, servers = sharded(None, None, None)
    assert put_slices(blobs, KEYS, PARTS, 60.0, soon=soon)
    assert [server.keys() for server in servers] == [[key] for key in KEYS]
    weights = read_weights(blobs, "k", SLICES, job="j", version=1)
    assert weights is not None
    assert weights.tobytes() == WEIGHTS.tobytes()
    servers[1].wipe()
    assert read_weights(blobs, "k", SLICES, job="j", version=1) is None


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_one_server_is_raised_after_all_calls(failing: int) -> None:
    problems: list[Exception | None] = [None, None, None]
    problems[failing] = ServiceUnavailableError("gone")
    blobs, servers = sharded(*problems)
    with pytest.raises(ServiceUnavailableError, match="gone"):
        put_slices(blobs, KEYS, PARTS, 60.0)
    assert all(server.ended for server in servers)


def test_one_server_gets_the_slices_in_their_order_and_in_this_thread() -> None:
    threads: list[threading.Thread] = []

    class Noted(MemoryBlobs):
        def put(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> None:
            threads.append(threading.current_thread())
            super().put(key, parts, ttl_s)

    blobs: Blobs = Noted()
    assert put_slices(blobs, KEYS, PARTS, 60.0)
    assert cast(Noted, blobs).keys() == KEYS
    assert threads == [threading.current_thread()] * 3
    with pytest.raises(BlobError):
        read_weights(blobs, "k", SLICES, job="other", version=1)
