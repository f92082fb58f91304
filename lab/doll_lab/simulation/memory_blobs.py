"""Blobs in a dict: no store slows down what runs or is measured beside them."""

from __future__ import annotations

from collections.abc import Sequence

from doll.storage.blobs import Buffer, NearBlobs


class MemoryBlobs(NearBlobs):
    """A blob store in memory. Nothing expires."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}

    def put(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> None:
        self._held[key] = b"".join(parts)

    def reserve(self, size_bytes: int) -> None:
        """Return None, because `put` copies."""

    def get(self, key: str) -> bytes | None:
        return self._held.get(key)

    def prefetch(self, keys: Sequence[str]) -> None:
        """Do nothing, because all blobs are in memory."""

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._held.pop(key, None)

    def close(self) -> None:
        """Do nothing, because nothing is open."""
