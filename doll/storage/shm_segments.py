"""Reuse files in shared memory, so that their pages are allocated, zeroed and mapped only once (ADR 0029).

A process that stores large blobs owns a few *segments*. Each is a file with its own name; a blob in it is a second name
(a hard link). Deleting the blob removes that name, and the owner then sees that the segment is free. A reader that has
mapped the segment holds a shared lock on it (flock, which the kernel releases when the process ends). The owner writes
into a segment only if it gets the exclusive lock, so no reader ever sees bytes change.

1. Owner: check that the segment has only one name, and that the exclusive lock is free. Write. Set the expiry time.
   Link the segment under the blob's name.
2. Reader: take the shared lock, *then* check that the blob's name still refers to this file. If it does, the content is
   stable, because the owner would have needed the lock. Otherwise the blob does not exist any more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from doll.storage.blobs import Buffer

SEGMENT: Final = ".segment-"  # followed by the owner's process id
_MAPPINGS_KEPT: Final = 32
_Bytes = npt.NDArray[np.uint8]


class Segment:
    """A file that this process owns and writes. `Segments` creates it."""

    def __init__(self, path: str, descriptor: int, size_bytes: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.size_bytes = size_bytes  # size of the file; it never changes
        self.busy = True  # a thread of this process is using it
        self.is_new = True  # nothing was written to it
        self._mapping: mmap.mmap | None = None
        self._lent: weakref.ref[_Bytes] | None = None

    def write(self, parts: Sequence[Buffer]) -> None:
        """Copy `parts`, which fill the segment, into the memory of `lend`: three times as fast as `os.write`."""
        memory, at = self.lend(), 0
        for part in filter(len, parts):
            np.copyto(np.frombuffer(memory[at : at + len(part)], np.uint8), np.frombuffer(part, np.uint8))
            at += len(part)

    def lend(self) -> memoryview:
        """Return the segment's memory. It is not reused while a view exists. Raise OSError if it cannot be mapped."""
        if self._mapping is None:
            self._mapping = mmap.mmap(self.descriptor, self.size_bytes)
        array = np.frombuffer(self._mapping, np.uint8)
        self._lent = weakref.ref(array)
        return array.data

    def lends(self, memory: object) -> bool:
        """Return whether `memory` was returned by `lend`."""
        array: object = None if self._lent is None else self._lent()
        return array is not None and isinstance(memory, memoryview) and memory.obj is array

    def is_free(self) -> bool:
        """Return whether the segment holds no blob and no reader uses its memory."""
        if self.busy or (self._lent is not None and self._lent() is not None):
            return False
        if os.fstat(self.descriptor).st_nlink > 1:
            return False
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # A later reader finds that no blob's name refers to this file.
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        return True

    def was_removed(self) -> bool:
        """Return whether the file was deleted or truncated. A deleted file uses memory and cannot be linked any more;
        writing to a truncated file raises SIGBUS."""
        status = os.fstat(self.descriptor)
        return status.st_nlink == 0 or status.st_size != self.size_bytes

    def close(self) -> None:
        """Release the segment. A blob in it stays until it is deleted."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self.descriptor)
        self._mapping = None  # unmapped with the last view of it


class Segments:
    """The segments that this process owns in `folder`. Safe to share between threads."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._owned: list[Segment] = []

    def take(self, size_bytes: int) -> Segment | None:
        """Return a free segment of this size, marked busy; None if no segment is free."""
        with self._lock:
            for segment in list(self._owned):
                if segment.size_bytes == size_bytes and segment.is_free():
                    if segment.was_removed():
                        self._owned.remove(segment)
                        segment.close()
                    else:
                        segment.busy, segment.is_new = True, False
                        return segment
        return None

    def create(self, size_bytes: int) -> Segment:
        """Create a segment with all of its memory, marked busy. Raise OSError if there is no memory for it (such as
        ENOSPC), or no folder."""
        path = f"{self._folder}/{SEGMENT}{os.getpid()}-{id(self)}-{next(self._numbers)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        segment = Segment(path, os.open(path, flags, 0o600), size_bytes)
        try:
            os.posix_fallocate(segment.descriptor, 0, size_bytes)  # otherwise a full file system raises SIGBUS later
        except BaseException:
            segment.close()
            raise
        with self._lock:
            self._owned.append(segment)
        return segment

    def lender_of(self, memory: object) -> Segment | None:
        """Return the segment that owns this memory."""
        with self._lock:
            return next((segment for segment in self._owned if segment.lends(memory)), None)

    def drop(self, segment: Segment) -> None:
        """Release a busy segment."""
        with self._lock:
            self._owned.remove(segment)
        segment.close()

    def drop_free(self) -> None:
        """Release all free segments, because their memory is needed."""
        with self._lock:
            free = [segment for segment in self._owned if segment.is_free()]
            self._owned = [segment for segment in self._owned if segment not in free]
        for segment in free:
            segment.close()

    def close(self) -> None:
        """Release all segments; the blobs in them stay."""
        with self._lock:
            owned, self._owned = self._owned, []
        for segment in owned:
            segment.close()


class _Mapping:
    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self.readers = 0


class Mappings:
    """The segments of any process, mapped for reading. Each segment is mapped only once, even if its blobs change.

    Safe to share between threads.
    """

    def __init__(self) -> None:
        # The lock is reentrant, because Python may free a view, and so call back, at any point of this thread.
        self._lock = threading.RLock()
        self._mapped: dict[tuple[int, int], _Mapping] = {}

    def view(self, path: str) -> memoryview | None:
        """Return the blob at `path`, read-only. It is not overwritten while a view of it exists.

        Raise FileNotFoundError if `path` does not exist. Return None if, since it was looked up, the blob was replaced
        or its owner took the file for a new blob; also if its file was truncated, because reading the file would raise
        SIGBUS.
        """
        with self._lock:
            status = os.stat(path, follow_symlinks=False)
            identity = (status.st_dev, status.st_ino)
            mapping = self._mapped.pop(identity, None)
            if mapping is None:
                self._make_room()
                mapping = _map(path, identity)
                if mapping is None:
                    return None
            self._mapped[identity] = mapping  # the last mapping is the one used last
            mapping.readers += 1
            try:
                fcntl.flock(mapping.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                status = os.stat(path, follow_symlinks=False)
                if (status.st_dev, status.st_ino) == identity and status.st_size >= len(mapping.memory):
                    array = np.frombuffer(mapping.memory, np.uint8)
                    weakref.finalize(array, self._release, mapping).atexit = False
                    return array.data
            except BlockingIOError:
                pass  # its owner is about to write
            except BaseException:
                self._release(mapping)
                raise
            self._release(mapping)
            return None

    def close(self) -> None:
        """Forget all mappings; memory that is still in use stays mapped."""
        with self._lock:
            for mapping in self._mapped.values():
                _unmap(mapping)
            self._mapped.clear()

    def _release(self, mapping: _Mapping) -> None:
        with self._lock:
            mapping.readers -= 1
            if not mapping.readers and mapping.descriptor >= 0:
                fcntl.flock(mapping.descriptor, fcntl.LOCK_UN)

    def _make_room(self) -> None:
        unused = [identity for identity, mapping in self._mapped.items() if not mapping.readers]
        surplus = len(self._mapped) + 1 - _MAPPINGS_KEPT
        for number, identity in enumerate(unused):
            if number < surplus or os.fstat(self._mapped[identity].descriptor).st_nlink == 0:
                _unmap(self._mapped.pop(identity))


def read_stable(path: str) -> bytes | None:
    """Return a copy of the blob at `path`, in a segment or not; None if, since it was opened, the blob was replaced or
    its owner took the file for a new blob. Raise FileNotFoundError if `path` does not exist."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        status, opened = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (opened.st_dev, opened.st_ino):
            return None
        data = os.read(descriptor, opened.st_size)
        while len(data) < opened.st_size and (more := os.read(descriptor, opened.st_size - len(data))):
            data += more
        return data
    except BlockingIOError:  # its owner is about to write
        return None
    finally:
        os.close(descriptor)  # this also releases the lock


def _map(path: str, identity: tuple[int, int]) -> _Mapping | None:
    """Return the mapping of the file; None if `path` now refers to another file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            return None
        raise
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != identity or not status.st_size:
            os.close(descriptor)
            return None
        return _Mapping(descriptor, status.st_size)
    except BaseException:
        os.close(descriptor)
        raise


def _unmap(mapping: _Mapping) -> None:
    # While a segment is still read, its mapping keeps the file open, so the lock and the memory remain.
    os.close(mapping.descriptor)
    mapping.descriptor = -1
