"""The blobs of a model in shards: each shard has a slice of the weights and of every contribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from doll.model.slices import Slice, Slices
from doll.process.threads import in_thread
from doll.storage.blobs import Blobs, Buffer, decode_blob
from doll.storage.sharded_blobs import ShardedBlobs

T = TypeVar("T")


class SliceBlobs(Blobs):
    """The blobs of one shard: it uses the keys of whole vectors for its slices of them."""

    def __init__(self, blobs: Blobs, slices: Slices, shard: int) -> None:
        self._blobs, self._slices, self._shard = blobs, slices, shard

    def _key(self, key: str) -> str:
        return self._slices.key(key, self._shard)

    def put(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> None:
        self._blobs.put(self._key(key), parts, ttl_s)

    def put_soon(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> bool:
        return self._blobs.put_soon(self._key(key), parts, ttl_s)

    def settle(self) -> None:
        self._blobs.settle()

    def reserve(self, size_bytes: int) -> memoryview | None:
        return self._blobs.reserve(size_bytes)

    def get(self, key: str) -> Buffer | None:
        return self._blobs.get(self._key(key))

    def get_soon(self, key: str) -> Buffer | None:
        return self._blobs.get_soon(self._key(key))

    @property
    def is_far(self) -> bool:
        return self._blobs.is_far

    def prefetch(self, keys: Sequence[str]) -> None:
        self._blobs.prefetch([self._key(key) for key in keys])

    def delete(self, *keys: str) -> None:
        self._blobs.delete(*(self._key(key) for key in keys))


def read_weights(blobs: Blobs, key: str, slices: Slices, *, job: str, version: int) -> npt.NDArray[np.float32] | None:
    """Return published weights, float32, shape (numel,), as a view if they are one blob. Return None if some of them
    are missing. Raise BlobError if a blob is damaged, or of another model, job or version."""
    if len(slices) == 1:
        data = blobs.get(key)
        return None if data is None else decode_blob(data, job=job, kind="w", version=version, numel=slices.numel)
    weights = np.empty(slices.numel, np.float32)

    def read(name: str, part: Slice) -> bool:
        if (data := blobs.get(name)) is None:
            return False
        part.view(weights)[:] = decode_blob(data, job=job, kind="w", version=version, numel=part.size)
        return True

    calls = [partial(read, name, part) for name, part in zip(slices.keys(key), slices, strict=True)]
    return weights if all(_results(blobs, calls)) else None


def put_slices(
    blobs: Blobs, keys: Sequence[str], slices: Sequence[Sequence[Buffer]], ttl_s: float, *, soon: bool = False
) -> bool:  # fmt: skip
    """Store the blobs of the slices of a contribution, and return whether the store has all of them already. `soon`: as
    `Blobs.put_soon` does. Raise what `Blobs.put` raises, after all calls have ended."""
    put = blobs.put_soon if soon else blobs.put
    results = _results(blobs, [partial(put, key, parts, ttl_s) for key, parts in zip(keys, slices, strict=True)])
    return False not in results


def _results(blobs: Blobs, calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make the calls, one for each slice, and return their results: at once if each slice has its own Redis server, so
    that their networks work at the same time; otherwise one after the other."""
    if len(calls) < 2 or not isinstance(blobs, ShardedBlobs):
        return [call() for call in calls]
    others = [in_thread(call, "slice") for call in calls[1:]]
    try:
        first = calls[0]()
    finally:
        wait(others)  # no thread may use the memory of the slices after the return
    return [first, *(other.result() for other in others)]
