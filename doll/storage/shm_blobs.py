"""Parameter blobs in shared memory: files of one folder on tmpfs, for processes on one machine (ADR 0007).

A blob is written to a file of its own and renamed, so that a reader sees all of it or none; the reader maps it, and
checks its checksums as it would Redis's. What does not fit goes to another store (Redis), and a key that is not here is
looked up there. Like Redis this is a cache: what is gone is computed or published again.

It costs one copy per blob; 4.8 MB through Redis cost 7 ms of CPU there, and sockets on both sides.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import mmap
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from doll import telemetry
from doll.errors import BlobError, ServiceUnavailableError
from doll.storage.blobs import MAX_BLOB_BYTES, Blobs, Buffer

log = telemetry.get_logger(__name__)

_SCAN_EVERY_S: Final = 1.0
_UNFINISHED: Final = ".new-"
_UNFINISHED_MAX_AGE_S: Final = 60.0  # then its writer has died
_PARTS_AT_ONCE: Final = 1000  # IOV_MAX is 1024


class ShmBlobs:
    """`Blobs` in the files of `folder`. Safe to share between threads.

    Args:
        folder: on tmpfs, accessible only to this user. It is created again if somebody removes it.
        limit_bytes: what all blobs in it may take together; checked against a scan that is at most a second old.
        fallback: takes what does not fit; closed with this store.
        clock: seconds since the machine's start, the same in all processes; an argument for tests.

    Raises:
        ServiceUnavailableError: the folder is another user's, or open to others.
    """

    def __init__(
        self, folder: Path, *, limit_bytes: int, fallback: Blobs, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = str(folder)
        self._limit_bytes = limit_bytes
        self._fallback = fallback
        self._clock = clock
        self._numbers = itertools.count()
        self._used_bytes = 0
        self._scanned_s = float("-inf")
        self._reported_full = False
        self._make_folder()

    def put(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> None:
        """Store `parts`, joined, under `key` for `ttl_s` seconds. May be repeated.

        Raises:
            BlobError: above `MAX_BLOB_BYTES`.
            ServiceUnavailableError: it does not fit, and `fallback` does not take it.
        """
        size = sum(map(len, parts))
        if size > MAX_BLOB_BYTES:
            raise BlobError(f"{key}: expected at most {MAX_BLOB_BYTES} bytes, got {size}")
        if self._fits(size) and self._try_write(key, parts, ttl_s):
            return
        if not self._reported_full:
            self._reported_full = True
            log.warning(
                "shared_memory_full", folder=self._folder, limit_bytes=self._limit_bytes, blob_bytes=size,
                action="what does not fit goes to Redis",
            )  # fmt: skip
        self._fallback.put(key, parts, ttl_s)
        self._unlink(key)

    def get(self, key: str) -> Buffer | None:
        """What is under `key`, mapped and read-only, or None. May be repeated."""
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return self._fallback.get(key)
        try:
            status = os.fstat(descriptor)
            if status.st_mtime_ns <= self._clock() * 1e9:
                return None
            if not status.st_size:
                return b""
            return memoryview(mmap.mmap(descriptor, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ))
        finally:
            os.close(descriptor)

    def delete(self, *keys: str) -> None:
        """Delete `keys`. May be repeated. The memory is free when the last reader has unmapped it."""
        if elsewhere := [key for key in keys if not self._unlink(key)]:
            self._fallback.delete(*elsewhere)

    def close(self) -> None:
        """Close the other store; the folder is its owner's (`doll.local.shared_memory`)."""
        close = getattr(self._fallback, "close", None)
        if close is not None:
            close()

    def _path(self, key: str) -> str:
        # A digest: no key can name a file elsewhere, or one whose name is too long.
        return f"{self._folder}/{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}"

    def _unlink(self, key: str) -> bool:
        """Whether the key was there."""
        try:
            os.unlink(self._path(key))
        except FileNotFoundError:
            return False
        return True

    def _try_write(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> bool:
        """Whether there was memory for it."""
        for folder_may_be_gone in (True, False):  # somebody may have removed it
            try:
                self._write(key, parts, ttl_s)
                return True
            except OSError as exc:
                if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                    return False
                if not (isinstance(exc, FileNotFoundError) and folder_may_be_gone):
                    raise ServiceUnavailableError(f"cannot write to {self._folder}: {exc}") from exc
                self._make_folder()
        raise AssertionError("unreachable")

    def _write(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> None:
        unfinished = f"{self._folder}/{_UNFINISHED}{os.getpid()}-{id(self)}-{next(self._numbers)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(unfinished, flags, 0o600)
        try:
            _write_all(descriptor, parts)
            # Its modification time says when it expires, on a clock that is never set back.
            os.utime(descriptor, ns=(0, max(0, round((self._clock() + ttl_s) * 1e9))))
            os.rename(unfinished, self._path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise
        finally:
            os.close(descriptor)
        self._used_bytes += sum(map(len, parts))

    def _fits(self, size: int) -> bool:
        """Whether `size` bytes more are within the limit; expired blobs are removed once a second."""
        if self._clock() - self._scanned_s >= _SCAN_EVERY_S or self._used_bytes + size > self._limit_bytes:
            self._scanned_s = self._clock()
            self._used_bytes = self._remove_expired()
        return self._used_bytes + size <= self._limit_bytes

    def _remove_expired(self) -> int:
        """Bytes that are left."""
        left = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.startswith(_UNFINISHED):
                        gone = time.time() - status.st_mtime > _UNFINISHED_MAX_AGE_S  # not dated yet
                    else:
                        gone = status.st_mtime_ns <= self._clock() * 1e9
                    if gone:
                        os.unlink(entry.path)
                    else:
                        left += status.st_size
        return left

    def _make_folder(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._folder, 0o700)
        status = os.lstat(self._folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ServiceUnavailableError(
                f"{self._folder}: expected a folder of user {os.geteuid()} that nobody else may enter, got mode "
                f"{stat.filemode(status.st_mode)} of user {status.st_uid}; remove it, or set blobs.kind: redis"
            )


def limit_bytes(folder: Path) -> int:
    """Space for the blobs of one run: half of the file system that holds `folder`. The same in all processes."""
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize // 2


def _write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    while views:
        written = os.writev(descriptor, views[:_PARTS_AT_ONCE])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


_: type[Blobs] = ShmBlobs
