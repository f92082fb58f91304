"""Several blobs of a far store on their way at once, while their reader does something else.

A read of a store that is 20 ms away takes 40 ms and more, most of them waiting. What waits is a thread, one for each
read. It does not keep its process from ending while the store is away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from doll.storage.blobs import Buffer

T = TypeVar("T")


class ReadsAhead:
    """Reads under way, by key. One thread calls the methods; `get`, as of `doll.storage.blobs.Blobs`, is called from
    others. At most `most` blobs are on their way or wait to be taken: beyond these the oldest are forgotten."""

    def __init__(self, get: Callable[[str], Buffer | None], most: int) -> None:
        self._get = get
        self._most = most
        self._reads: dict[str, Future[Buffer | None]] = {}

    def begin(self, keys: Sequence[str]) -> None:
        """Read these, if they are not being read, and as many as there may be."""
        for key in keys[: self._most]:
            if key not in self._reads:
                self._reads[key] = in_thread(partial(self._get, key), "read-ahead")
        while len(self._reads) > self._most:
            self.forget(next(iter(self._reads)))

    def is_reading(self, key: str) -> bool:
        """Whether `get` would wait."""
        return key in self._reads and not self._reads[key].done()

    def get(self, key: str) -> Buffer | None:
        """The blob under `key`; waits for a read that has begun, else reads it now. Raises what `Blobs.get` does."""
        read = self._reads.pop(key, None)
        return self._get(key) if read is None else read.result()

    def forget(self, key: str) -> None:
        """It is not asked for any more."""
        self._reads.pop(key, None)


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """The result or exception of `call`, in a thread of its own that does not keep the process from ending."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as exc:
            done.set_exception(exc)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
