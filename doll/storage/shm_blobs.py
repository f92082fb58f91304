"""Store parameter blobs in shared memory: files of one folder on tmpfs, for processes on one machine (ADR 0007).

A blob appears under its name at once, so a reader sees either the complete blob or none; the reader verifies its
checksums as with Redis. Large blobs are in files that are reused (`doll.storage.shm_segments`), because allocating
memory takes three times as long as copying into it. Blobs that do not fit are stored in Redis, and missing keys are
looked up there. Like Redis, this is a cache: a lost blob is computed or published again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from doll import telemetry
from doll.errors import BlobError, ServiceUnavailableError
from doll.process.files import folder_problem
from doll.storage.blobs import MAX_BLOB_BYTES, Blobs, Buffer, NearBlobs
from doll.storage.shm_segments import SEGMENT, Mappings, Segment, Segments, read_stable

log = telemetry.get_logger(__name__)

_SCAN_EVERY_S: Final = 1.0
# Maximum number of attempts to write to a folder that others remove, or to read a file that others replace.
_ATTEMPTS: Final = 4
_NO_MEMORY: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
_UNFINISHED: Final = ".new-"
_UNFINISHED_MAX_AGE_S: Final = 60.0  # if a file is older than this, its writer has died
_PARTS_AT_ONCE: Final = 1000  # IOV_MAX is 1024
_REUSED_FROM_BYTES: Final = 1 << 15  # below this size, a new file is as fast
_MAPPED_FROM_BYTES: Final = 1 << 20  # smaller blobs are read, which is as cheap as a mapping


class ShmBlobs(NearBlobs):
    """`Blobs` in the files of `folder`. Safe to share between threads.

    Args:
        folder: a folder on tmpfs, accessible only to this user. It is created again if it is removed.
        limit_bytes: maximum total size of the blobs, which are scanned at most once a second.
        fallback: store for blobs that do not fit; it is closed with this store.
        clock: seconds since the machine's start, the same in all processes; an argument for tests.
        reused_from_bytes: blobs of this size and above are in files that are reused.
        mapped_from_bytes: blobs of this size and above are mapped, not read.

    Raises:
        ServiceUnavailableError: the folder belongs to another user, or other users can access it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int,
        fallback: Blobs,
        clock: Callable[[], float] = time.monotonic,
        reused_from_bytes: int = _REUSED_FROM_BYTES,
        mapped_from_bytes: int = _MAPPED_FROM_BYTES,
    ) -> None:
        self._folder = str(folder)
        self._limit_bytes = limit_bytes
        self._fallback = fallback
        self._clock = clock
        self._numbers = itertools.count()
        self._used_bytes = 0
        self._scanned_s = float("-inf")
        self._reported_full = False
        self._reused_from_bytes = max(reused_from_bytes, 1)
        self._mapped_from_bytes = mapped_from_bytes
        self._segments = Segments(self._folder)
        self._mappings = Mappings()
        self._make_folder()

    def put(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> None:
        size = sum(map(len, parts))
        if size > MAX_BLOB_BYTES:
            raise BlobError(f"{key}: expected at most {MAX_BLOB_BYTES} bytes, got {size}")
        if size >= self._reused_from_bytes:
            if self._put_reserved(key, parts, ttl_s) or self._try_put_in_segment(key, parts, size, ttl_s):
                return
        elif self._fits(size) and self._try(lambda: self._write(key, parts, ttl_s)):
            return
        if not self._reported_full:
            self._reported_full = True
            log.warning(
                "shared_memory_full", folder=self._folder, limit_bytes=self._limit_bytes, blob_bytes=size,
                action="what does not fit goes to Redis",
            )  # fmt: skip
        self._fallback.put(key, parts, ttl_s)
        self._unlink(key)

    def reserve(self, size_bytes: int) -> memoryview | None:
        """Return memory for a blob; None if no memory is left, or a reservation would not be faster."""
        if size_bytes < self._reused_from_bytes:
            return None
        segment = self._take_segment(size_bytes)
        if segment is None:
            return None
        try:
            return segment.lend()
        except OSError:
            self._segments.drop(segment)
            return None
        finally:
            segment.busy = False

    def get(self, key: str) -> Buffer | None:
        """Return the blob, read-only."""
        path = self._path(key)
        try:
            for _ in range(_ATTEMPTS):
                status = os.stat(path, follow_symlinks=False)
                if status.st_mtime_ns <= self._clock() * 1e9:
                    return None
                is_mapped = status.st_size >= self._mapped_from_bytes
                if (blob := self._mappings.view(path) if is_mapped else read_stable(path)) is not None:
                    return blob
                # The file was deleted or replaced; the next attempt shows which.
        except FileNotFoundError:
            return self._fallback.get(key)
        return None

    def prefetch(self, keys: Sequence[str]) -> None:
        """Do nothing: the blobs are in memory."""

    def delete(self, *keys: str) -> None:
        """Delete `keys`. The memory is freed when no reader uses it any more."""
        if elsewhere := [key for key in keys if not self._unlink(key)]:
            self._fallback.delete(*elsewhere)

    def close(self) -> None:
        """Close the other store. The folder belongs to its owner (`doll.local.shared_memory`), and its blobs stay."""
        self._segments.close()
        self._mappings.close()
        close = getattr(self._fallback, "close", None)
        if close is not None:
            close()

    def _path(self, key: str) -> str:
        # The name is a checksum of the key, so that it is short and cannot refer to another folder.
        return f"{self._folder}/{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}"

    def _unlink(self, key: str) -> bool:
        """Delete the blob of `key`, and return whether it existed."""
        try:
            os.unlink(self._path(key))
        except FileNotFoundError:
            return False
        return True

    def _put_reserved(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> bool:
        """Store `parts` under `key` if they are memory from `reserve`. Return whether they were stored."""
        segment = self._segments.lender_of(parts[0]) if len(parts) == 1 else None
        if segment is None:
            return False
        try:
            self._link(segment, key, ttl_s)
        except FileNotFoundError:
            return False  # its file has been deleted: the blob is copied
        except OSError as exc:
            if exc.errno in _NO_MEMORY:
                return False  # a name takes memory too
            raise ServiceUnavailableError(f"cannot write to {self._folder}: {exc}") from exc
        return True

    def _try_put_in_segment(self, key: str, parts: Sequence[Buffer], size: int, ttl_s: float) -> bool:
        """Store the blob in a segment, and return whether there was memory for it."""

        def write() -> None:
            segment = self._take_segment(size)
            if segment is None:
                raise OSError(errno.ENOSPC, "no shared memory")
            try:
                if segment.is_new:
                    _write_all(segment.descriptor, parts)
                else:
                    segment.write(parts)
                self._link(segment, key, ttl_s)
            except BaseException:
                self._segments.drop(segment)
                raise
            segment.busy = False

        return self._try(write)

    def _take_segment(self, size: int) -> Segment | None:
        """Return a busy segment of `size` bytes; None if there is no memory for it."""
        segment = self._segments.take(size)
        if segment is not None:
            return segment
        if not self._fits(size):
            self._segments.drop_free()
            self._scanned_s = float("-inf")
            if not self._fits(size):
                return None

        def create() -> None:
            nonlocal segment
            segment = self._segments.create(size)
            self._used_bytes += size

        return segment if self._try(create) else None

    def _link(self, segment: Segment, key: str, ttl_s: float) -> None:
        """Link the segment's blob under its name."""
        self._date(segment.descriptor, ttl_s)
        path = self._path(key)
        try:
            os.link(segment.path, path, follow_symlinks=False)
        except FileExistsError:  # an older blob: it is replaced in one step
            unfinished = self._unfinished_path()
            os.link(segment.path, unfinished, follow_symlinks=False)
            os.rename(unfinished, path)

    def _try(self, write: Callable[[], None]) -> bool:
        """Call `write`, and return whether there was memory for it. If the folder is missing, create it and retry."""
        for _ in range(_ATTEMPTS):
            try:
                write()
                return True
            except FileNotFoundError:  # the folder was removed, maybe while it was being created again
                with contextlib.suppress(FileNotFoundError):
                    self._make_folder()
            except OSError as exc:
                if exc.errno in _NO_MEMORY:
                    return False
                raise ServiceUnavailableError(f"cannot write to {self._folder}: {exc}") from exc
        return False

    def _write(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> None:
        unfinished = self._unfinished_path()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(unfinished, flags, 0o600)
        try:
            _write_all(descriptor, parts)
            self._date(descriptor, ttl_s)
            os.rename(unfinished, self._path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise
        finally:
            os.close(descriptor)
        self._used_bytes += sum(map(len, parts))

    def _unfinished_path(self) -> str:
        return f"{self._folder}/{_UNFINISHED}{os.getpid()}-{id(self)}-{next(self._numbers)}"

    def _date(self, descriptor: int, ttl_s: float) -> None:
        """Set the modification time of a blob's file to the blob's expiry, on a clock that is never set back."""
        os.utime(descriptor, ns=(0, max(0, round((self._clock() + ttl_s) * 1e9))))

    def _fits(self, size: int) -> bool:
        """Return whether `size` more bytes are within the limit. Expired blobs are removed once a second."""
        if self._clock() - self._scanned_s >= _SCAN_EVERY_S or self._used_bytes + size > self._limit_bytes:
            self._scanned_s = self._clock()
            self._used_bytes = self._remove_expired()
        return self._used_bytes + size <= self._limit_bytes

    def _remove_expired(self) -> int:
        """Remove expired blobs, and return the bytes that remain."""
        left: dict[int, int] = {}  # by inode: a segment with a blob in it has two names
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.startswith(_UNFINISHED):
                        gone = time.time() - status.st_mtime > _UNFINISHED_MAX_AGE_S  # it has no expiry yet
                    elif entry.name.startswith(SEGMENT):
                        # This also removes a segment that waits to be reused. Its owner creates another one.
                        gone = status.st_mtime_ns <= self._clock() * 1e9 or _is_orphan(entry.name, status.st_nlink)
                    else:
                        gone = status.st_mtime_ns <= self._clock() * 1e9
                    if gone:
                        os.unlink(entry.path)
                    else:
                        left[status.st_ino] = status.st_size
        return sum(left.values())

    def _make_folder(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._folder, 0o700)
        if problem := folder_problem(Path(self._folder)):
            raise ServiceUnavailableError(f"{problem}; remove it, or set blobs.kind: redis")


def limit_bytes(folder: Path) -> int:
    """Return the space for the blobs of one run: half of the file system of `folder`, the same in all processes."""
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize // 2


def _is_orphan(name: str, links: int) -> bool:
    """Return whether a segment has no blob and no owner."""
    owner = name.removeprefix(SEGMENT).partition("-")[0]
    return links == 1 and not (owner.isdigit() and os.path.exists(f"/proc/{owner}"))


def _write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    while views:
        written = os.writev(descriptor, views[:_PARTS_AT_ONCE])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


_: type[Blobs] = ShmBlobs
