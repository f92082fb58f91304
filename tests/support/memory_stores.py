"""Fakes for tests of a user's code: implementations of the storage ports in memory that fail on request.

They pass the same contract tests as the real adapters.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from doll.errors import BlobError
from doll.storage.blobs import MAX_BLOB_BYTES, Blobs, Buffer, NearBlobs
from doll.storage.checkpoints import Checkpoint, CheckpointStore, checkpoint_name, checkpoints_among, unused_parts
from doll.storage.version_marks import NO_HISTORY, StoredVersion, VersionHistory


class MemoryBlobs(NearBlobs):
    """`Blobs` in a dict. `fail_next(error)` makes the next call raise; `wipe()` deletes all, as Redis's restart does.

    Args:
        clock: seconds, monotonic; a test can let blobs expire with it.
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

    def reserve(self, size_bytes: int) -> None:
        """None: `put` copies."""

    def get(self, key: str) -> bytes | None:
        self._fail()
        data, expires_s = self._held.get(key, (None, 0.0))
        return data if expires_s > self._clock() else None

    def prefetch(self, keys: Sequence[str]) -> None:
        """Nothing: they are in memory."""

    def delete(self, *keys: str) -> None:
        self._fail()
        for key in keys:
            self._held.pop(key, None)

    def keys(self) -> list[str]:
        """Keys that are held, in the order they were stored."""
        return [key for key, (_, expires_s) in list(self._held.items()) if expires_s > self._clock()]

    def wipe(self) -> None:
        """Delete everything."""
        self._held.clear()

    def fail_next(self, *errors: Exception) -> None:
        """Let the next calls raise `errors`, one each."""
        self._failures.extend(errors)

    def _fail(self) -> None:
        if self._failures:
            raise self._failures.popleft()


class MemoryCheckpointStore(CheckpointStore):
    """`CheckpointStore` in a dict, thread-safe. `damage` flips a bit, `fail_next` makes the next saves raise.

    Attributes:
        saved: (term, version) of each successful `save`, in order, pruned ones included.
    """

    def __init__(self, job: str, *, keep: int = 3, history: VersionHistory = NO_HISTORY) -> None:
        super().__init__(job, "memory", keep, history)
        self._held: dict[tuple[int, int], bytes] = {}
        self._saved_s: dict[tuple[int, int], float] = {}
        self.parts: dict[str, bytes] = {}
        self._documents: dict[str, bytes] = {}  # shared by handles
        self._claims = [0]
        self._failures: deque[Exception] = deque()
        self._lock = threading.RLock()
        self.saved: list[tuple[int, int]] = []

    def claim_term(self, above: int = 0) -> int:
        with self._lock:
            self._claims.append(max(self._newest(), above) + 1)
            return self._claims[-1]

    def newest_term(self) -> int:
        with self._lock:
            return self._newest()

    def save(self, checkpoint: Checkpoint) -> None:
        self._check_owner(checkpoint)
        key = (checkpoint.term, checkpoint.version)
        with self._lock:
            encoded = self._encode(checkpoint, self._held)
            data = b"".join(encoded.parts)
            if self._failures:
                raise self._failures.popleft()
            self._refuse_if_superseded(checkpoint, self._newest(), self._held)
            self._require_base(checkpoint, encoded, self._held)
            self._held[key], self._saved_s[key] = data, time.time()
            self.saved.append(key)
            self._note_saved(checkpoint, encoded)
            for old in self._obsolete(self.stored()):
                del self._held[old.key]
            self._delete_unused_parts()

    def delete(self, keys: Iterable[tuple[int, int]]) -> None:
        with self._lock:
            for key in self._but_newest(keys):
                self._held.pop(key, None)
            self._delete_unused_parts()

    def _delete_unused_parts(self) -> None:
        for name in unused_parts([*self.parts, *(checkpoint_name(*key) for key in self._held)]):
            del self.parts[name]

    def _write_part(self, name: str, data: Sequence[Buffer], checkpoint: Checkpoint) -> None:
        with self._lock:
            if self._failures:
                raise self._failures.popleft()
            self._refuse_if_superseded(checkpoint, self._newest(), self._held)
            self.parts[name] = b"".join(data)

    def _read_file(self, name: str, size: int | None = None) -> bytes:
        keys = checkpoints_among([name])
        data = self._held.get(keys[0]) if keys else self.parts.get(name)
        if data is None:
            raise FileNotFoundError(name)
        return data[:size]

    def versions(self) -> list[tuple[int, int]]:
        with self._lock:
            return sorted(self._held)

    def stored(self) -> list[StoredVersion]:
        with self._lock:
            return [StoredVersion(*key, self._saved_s[key], len(data)) for key, data in sorted(self._held.items())]

    def read_document(self, name: str) -> tuple[bytes | None, bytes | None]:
        data = self._documents.get(name)
        return data, data

    def replace_document(self, name: str, data: bytes, known: bytes | None) -> bytes | None:
        with self._lock:
            if self._documents.get(name) != known:
                return None
            self._documents[name] = data
            return data

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
