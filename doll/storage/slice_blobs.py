"""The blobs of a model in shards: each shard has a slice of the weights and of every contribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from doll.model.slices import Slices
from doll.storage.blobs import Blobs, Buffer, decode_blob


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
    for name, part in zip(slices.keys(key), slices, strict=True):
        if (data := blobs.get(name)) is None:
            return None
        part.view(weights)[:] = decode_blob(data, job=job, kind="w", version=version, numel=part.size)
    return weights
