"""The publication of the table rows that each version has changed. Rows are published only while a reader follows them.

A term begins with publication, so that a reader of the previous term can continue at once from the term's checkpoint.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, NamedTuple

from doll.process.threads import in_thread
from doll.ps.tables.store import TableStore
from doll.storage.blobs import Blobs, Buffer, followed_key, row_changes_key
from doll.storage.row_changes import FOLLOWED_S, WORD_LIVES_S, RowChanges, encode_row_changes
from doll.telemetry import get_logger

log = get_logger(__name__)

_LOOK_S: Final = 1.0
_MARK_S: Final = 60.0
_KEPT_BYTES: Final = 64 << 20  # limit of changes in the blob store; readers that need more await a checkpoint


class _KeptChange(NamedTuple):
    key: str
    num_bytes: int
    until_s: float


class Publication(NamedTuple):
    """The calls of the blob store that are still needed for a version. `stores`: calls that must be made in this order,
    before the pointer names the version. `unused`: keys of older changes that can be deleted."""

    stores: list[Callable[[], None]]
    unused: list[str]


class RowWriter:
    """A writer of changed rows for one term. Not thread-safe."""

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
        self._look_at_s = self._mark_at_s = self._followed_until_s = float("-inf")
        self._word = b""  # last message of a reader
        self._coming_word: Future[Buffer | None] | None = None
        self._began: int | None = None  # first version of the term
        self._version: int | None = None  # version up to which changes are published; None if no reader follows
        self._kept: deque[_KeptChange] = deque()  # changes in the blob store
        self._num_bytes = 0

    def publish(self, version: int) -> Publication:
        """Return the publication of the changes between the last call and `version`, the tables' current version. The
        publication is empty if no reader follows.

        If a call of `stores` fails, readers find that a change is missing, and wait for a checkpoint.
        """
        stores: list[Callable[[], None]] = []
        unused: list[str] = []
        if self._began is None:
            self._began = version
        if (now_s := self._clock()) >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_S
            self._look(version, now_s, stores)
        if self._version is None or version <= self._version:
            return Publication(stores, unused)
        changes = RowChanges(self._version, version, self._began, self._tables.changes())
        blob = encode_row_changes(changes, self._shapes, job=self._scope)
        key = row_changes_key(self._scope, self._term, version)
        stores.append(partial(self._blobs.put, key, blob, self._ttl_s))
        self._version = version
        self._kept.append(_KeptChange(key, sum(map(len, blob)), now_s + self._ttl_s))
        self._num_bytes += self._kept[-1].num_bytes
        while self._kept[0].until_s <= now_s or (self._num_bytes > self._kept_bytes and len(self._kept) > 1):
            oldest = self._kept.popleft()
            self._num_bytes -= oldest.num_bytes
            if oldest.until_s > now_s:
                unused.append(oldest.key)
        return Publication(stores, unused)

    def _look(self, version: int, now_s: float, stores: list[Callable[[], None]]) -> None:
        is_followed = self._is_followed(now_s, stores)
        if is_followed == (self._version is not None):
            return
        log.info("rows_followed" if is_followed else "rows_not_followed", version=version)
        self._version = version if is_followed else None
        self._tables.follow(is_followed)

    def _is_followed(self, now_s: float, stores: list[Callable[[], None]]) -> bool:
        """Return whether a reader has sent a new message. The key for these messages must always exist: a store in
        shared memory would look for a missing key in Redis, and Redis may be unavailable while this job continues."""
        key = followed_key(self._scope)
        is_first = self._mark_at_s == float("-inf")
        if is_first or (now_s >= self._followed_until_s and now_s >= self._mark_at_s):
            self._mark_at_s = now_s + _MARK_S
            stores.append(partial(self._blobs.put, key, [b""], WORD_LIVES_S))
            if is_first:
                self._followed_until_s = now_s + FOLLOWED_S
            return is_first
        word = self._word_at(key)
        if word and word != self._word:
            self._word, self._followed_until_s = word, now_s + FOLLOWED_S
        return now_s < self._followed_until_s

    def _word_at(self, key: str) -> bytes:
        """Return the last message of readers; for a far store, without a wait, the message at the previous check."""
        if not self._blobs.is_far:
            return bytes(self._blobs.get(key) or b"")
        coming = self._coming_word
        if coming is not None and not coming.done():
            return b""
        self._coming_word = in_thread(partial(self._blobs.get, key), "followed")
        return b"" if coming is None else bytes(coming.result() or b"")
