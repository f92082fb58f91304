"""The blobs of a model in shards over several Redis servers, one for each shard (`redis.shard_addresses`).

The slices of weights and contributions of shard n are in the n-th server, and all other blobs in the job's Redis. So
the bytes of a model spread over as many servers, as in MLLess (Fig. 13).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from doll.storage.blobs import Blobs, Buffer
from doll.storage.redis_blobs import RedisBlobs

_SLICE: Final = re.compile(r":([0-9]+)of([0-9]+)$")  # the end of `doll.model.slices.Slices.key`


class ShardedBlobs:
    """`Blobs` in several Redis servers, by the key. This object closes `common` and `shards`."""

    def __init__(self, common: RedisBlobs, shards: Sequence[RedisBlobs]) -> None:
        self._common, self._shards = common, tuple(shards)
        self._all = (common, *shards)

    def _of(self, key: str) -> RedisBlobs:
        match = _SLICE.search(key)
        if match is None or int(match[2]) != len(self._shards):
            return self._common
        return self._shards[int(match[1])]

    def put(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> None:
        self._of(key).put(key, parts, ttl_s)

    def put_soon(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> bool:
        return self._of(key).put_soon(key, parts, ttl_s)

    def settle(self) -> None:
        for store in self._all:
            store.settle()

    def reserve(self, size_bytes: int) -> None:
        """Return None, as `RedisBlobs`."""

    def get(self, key: str) -> Buffer | None:
        return self._of(key).get(key)

    def get_soon(self, key: str) -> Buffer | None:
        return self._of(key).get_soon(key)

    @property
    def is_far(self) -> bool:
        return any(store.is_far for store in self._all)

    def prefetch(self, keys: Sequence[str]) -> None:
        for store in {self._of(key) for key in keys}:
            store.prefetch([key for key in keys if self._of(key) is store])

    def delete(self, *keys: str) -> None:
        for store in {self._of(key) for key in keys}:
            store.delete(*(key for key in keys if self._of(key) is store))

    def close(self) -> None:
        for store in self._all:
            store.close()


_: type[Blobs] = ShardedBlobs
