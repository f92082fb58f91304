"""Publishes the rows of tables that each version has changed, while somebody follows them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from doll.ps.tables.store import TableStore
from doll.storage.blobs import Blobs, followed_key, row_changes_key
from doll.storage.row_changes import RowChanges, encode_row_changes
from doll.telemetry import get_logger

log = get_logger(__name__)

_LOOK_S: Final = 1.0
_KEPT_BYTES: Final = 64 << 20  # of changes in the blob store: a reader that is further behind waits for a checkpoint


class RowWriter:
    """Of one term. Not thread-safe."""

    def __init__(
        self, scope: str, term: int, blobs: Blobs, ttl_s: float, tables: TableStore, *,
        clock: Callable[[], float] = time.monotonic, kept_bytes: int = _KEPT_BYTES,
    ) -> None:  # fmt: skip
        self._scope = scope
        self._term = term
        self._blobs = blobs
        self._ttl_s = ttl_s
        self._tables = tables
        self._shapes = tables.shapes
        self._clock = clock
        self._kept_bytes = kept_bytes
        self._look_at_s = float("-inf")
        self._began: int | None = None  # first version of the term
        self._version: int | None = None  # up to which changes are published; None: nobody follows
        self._kept: deque[tuple[str, int]] = deque()  # keys of what is in the blob store, and its bytes
        self._num_bytes = 0

    def put(self, version: int) -> list[str]:
        """Store what `version`, that of the tables now, has changed since this was called before, if anybody follows.

        Returns keys of older changes, to be deleted.
        """
        if self._began is None:
            self._began = version
        if (now_s := self._clock()) >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_S
            self._look(version)
        if self._version is None or version <= self._version:
            return []
        changes = RowChanges(self._version, version, self._began, self._tables.changes())
        blob = encode_row_changes(changes, self._shapes, job=self._scope)
        key = row_changes_key(self._scope, self._term, version)
        self._blobs.put(key, blob, self._ttl_s)
        self._version = version
        self._kept.append((key, size := sum(map(len, blob))))
        self._num_bytes += size
        unused = []
        while self._num_bytes > self._kept_bytes and len(self._kept) > 1:
            key, size = self._kept.popleft()
            self._num_bytes -= size
            unused.append(key)
        return unused

    def _look(self, version: int) -> None:
        """See whether anybody follows."""
        is_followed = self._blobs.get(followed_key(self._scope)) is not None
        if is_followed == (self._version is not None):
            return
        log.info("rows_followed" if is_followed else "rows_not_followed", version=version)
        self._version = version if is_followed else None
        if is_followed:
            self._tables.follow()
        else:
            self._tables.unfollow()
