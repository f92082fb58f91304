"""Read several blobs of a far store at the same time, while their reader does something else.

A read from a store that is 20 ms away takes 40 ms or more, most of it waiting. Each read waits in its own thread, which
does not keep the process from ending while the store is unavailable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from doll.process.threads import in_thread
from doll.storage.blobs import Buffer


class ReadsAhead:
    """The reads in progress, by key. One thread calls the methods; other threads only call the function `get`
    (`Blobs.get` of `doll.storage.blobs`). At most `most` blobs are being read or wait to be taken; beyond that, the
    oldest are forgotten."""

    def __init__(self, get: Callable[[str], Buffer | None], most: int) -> None:
        self._get = get
        self._most = most
        self._reads: dict[str, Future[Buffer | None]] = {}

    def begin(self, keys: Sequence[str]) -> None:
        """Start to read those of these keys that are not being read yet, up to the maximum."""
        for key in keys[: self._most]:
            if key not in self._reads:
                self._reads[key] = in_thread(partial(self._get, key), "read-ahead")
        while len(self._reads) > self._most:
            self.forget(next(iter(self._reads)))

    def is_reading(self, key: str) -> bool:
        """Return whether `get` would wait."""
        return key in self._reads and not self._reads[key].done()

    def get(self, key: str) -> Buffer | None:
        """Return the blob under `key`: wait for a read in progress, or read it now. Raise what `Blobs.get` raises."""
        read = self._reads.pop(key, None)
        return self._get(key) if read is None else read.result()

    def forget(self, key: str) -> None:
        """Forget the key, because its blob is not needed any more."""
        self._reads.pop(key, None)
