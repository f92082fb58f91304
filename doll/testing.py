"""Fakes that ship: small honest implementations of the ports, held in memory, that can be told to fail.

They pass the same contract tests as the real adapters, so a test of a user's code may trust them.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from doll import telemetry
from doll.errors import BlobError, CheckpointError, FencedError
from doll.storage.blobs import MAX_BLOB_BYTES, Blobs, Buffer
from doll.storage.checkpoints import (
    Checkpoint,
    CheckpointStore,
    DamagedError,
    check_owner,
    decode_checkpoint,
    encode_checkpoint,
)

log = telemetry.get_logger(__name__)


class MemoryBlobs:
    """`Blobs` in a dict. `fail_next(error)` makes the next call raise; `wipe()` forgets all, as a restarted Redis does.

    Args:
        clock: seconds, monotonic; an argument, so that a test can let blobs expire.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[str, tuple[bytes, float]] = {}
        self._failures: deque[Exception] = deque()

    def put(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> None:
        self._fail()
        size = sum(map(len, parts))
        if size > MAX_BLOB_BYTES:
            raise BlobError(f"{key}: expected at most {MAX_BLOB_BYTES} bytes, got {size}")
        self._held[key] = (b"".join(parts), self._clock() + ttl_s)

    def get(self, key: str) -> bytes | None:
        self._fail()
        data, expires_s = self._held.get(key, (None, 0.0))
        return data if expires_s > self._clock() else None

    def delete(self, *keys: str) -> None:
        self._fail()
        for key in keys:
            self._held.pop(key, None)

    def keys(self) -> list[str]:
        """Keys that are held, in the order they were stored."""
        return [key for key, (_, expires_s) in self._held.items() if expires_s > self._clock()]

    def wipe(self) -> None:
        """Forget everything."""
        self._held.clear()

    def fail_next(self, *errors: Exception) -> None:
        """Let the next calls raise `errors`, one each."""
        self._failures.extend(errors)

    def _fail(self) -> None:
        if self._failures:
            raise self._failures.popleft()


class MemoryCheckpointStore:
    """`CheckpointStore` in a dict, thread-safe. `damage` flips a bit, `fail_next` makes the next saves raise.

    Attributes:
        saved: (term, version) of each successful `save`, in order, pruned ones included.
    """

    def __init__(self, job: str, *, keep: int = 3) -> None:
        self._job = job
        self._keep = keep
        self._held: dict[tuple[int, int], bytes] = {}
        self._claims = [0]
        self._failures: deque[Exception] = deque()
        self._lock = threading.Lock()
        self.saved: list[tuple[int, int]] = []

    def claim_term(self, above: int = 0) -> int:
        with self._lock:
            self._claims.append(max(self._newest(), above) + 1)
            return self._claims[-1]

    def newest_term(self) -> int:
        with self._lock:
            return self._newest()

    def save(self, checkpoint: Checkpoint) -> None:
        check_owner(checkpoint, job=self._job, fingerprint=None, where="memory")
        data = b"".join(encode_checkpoint(checkpoint))
        term, version = key = (checkpoint.term, checkpoint.version)
        with self._lock:
            if self._failures:
                raise self._failures.popleft()
            if self._newest() > term:
                raise FencedError(f"parameter server term {term} is over: term {self._newest()} has claimed the store")
            if any(held[0] == term and held[1] > version for held in self._held):
                raise CheckpointError(f"expected a later version of term {term}, got {version}")
            self._held[key] = data
            self.saved.append(key)
            for old in sorted(self._held)[: -self._keep]:
                del self._held[old]

    def load_newest(self, fingerprint: str | None) -> Checkpoint | None:
        for key in reversed(self.versions()):
            try:
                checkpoint = decode_checkpoint(self._held[key])
            except DamagedError as exc:
                log.warning("checkpoint_damaged", key=key, error=str(exc))
                continue
            check_owner(checkpoint, job=self._job, fingerprint=fingerprint, where="memory")
            return checkpoint
        if self._held:
            raise CheckpointError(f"none of the {len(self._held)} checkpoints in memory is whole")
        return None

    def versions(self) -> list[tuple[int, int]]:
        with self._lock:
            return sorted(self._held)

    def damage(self, term: int, version: int) -> None:
        """Flip one bit in the middle of a checkpoint."""
        data = bytearray(self._held[term, version])
        data[len(data) // 2] ^= 1
        self._held[term, version] = bytes(data)

    def handle(self, job: str) -> MemoryCheckpointStore:
        """A second store on the same memory, as another process would open it."""
        other = copy.copy(self)
        other._job = job
        return other

    def fail_next(self, *errors: Exception) -> None:
        """Let the next saves raise `errors`, one each, and store nothing."""
        self._failures.extend(errors)

    def _newest(self) -> int:
        return max([*self._claims, *(term for term, _ in self._held)])


_blobs: type[Blobs] = MemoryBlobs
_store: type[CheckpointStore] = MemoryCheckpointStore
