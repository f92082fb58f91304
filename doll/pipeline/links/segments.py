"""Shared memory for the large arrays of a link: segments that are reused, without a copy at the receiver (ADR 0040).

The sender copies arrays into a free segment, and the frame names the segment. The received arrays are views of the
segment. When the last view is deleted, the receiver returns the segment. Sending a frame and returning a segment are
system calls; they order the memory accesses of both processes on any processor.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import weakref
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from doll.errors import DollError
from doll.pipeline.links.frames import Array, ArraySpec, LinkFrameError

MAX_SEGMENTS: Final = 255
# From 64 KiB on, a copy through the socket takes as much processor time.
MIN_BYTES: Final = 1 << 17
ALIGNMENT_BYTES: Final = 64  # alignment of each array: a cache line, and the widest vector registers
_Bytes = npt.NDArray[np.uint8]


class LinkSegments:
    """The access of one end to the segments of both directions. Created by `segments_pair`.

    Only one thread at a time may call `store`, and only one may call `load`. Views may be deleted in any thread.
    """

    def __init__(
        self, returns: socket.socket, own: mmap.mmap, far: mmap.mmap, *, segment_bytes: int, min_bytes: int
    ) -> None:
        returns.setblocking(False)
        self._returns = returns
        self._own, self._far = own, far
        self._segment_bytes = segment_bytes
        self._count = len(own) // segment_bytes
        self._min_bytes = min_bytes
        # The most recently used segment is used next, so that as few different pages as possible are written.
        self._free = list(range(self._count))[::-1]
        self._lent: set[int] = set()

    def store(self, arrays: Sequence[Array]) -> int:
        """Copy arrays in C order into a segment.

        Returns:
            Place of the segment, from 1 on. 0: the arrays are smaller than `min_bytes` or larger than a segment, or no
            segment is free.

        Raises:
            LinkFrameError: the other end has returned a segment that it does not have.
        """
        *starts, total_bytes = _starts([array.nbytes for array in arrays])
        if not max(self._min_bytes, 1) <= total_bytes <= self._segment_bytes:
            return 0
        if not self._free:
            self._collect()
        if not self._free:
            return 0
        number = self._free.pop()
        memory = self._view(self._own, number)
        for array, start in zip(arrays, starts, strict=True):
            np.copyto(_as(memory, start, ArraySpec(array.dtype, array.shape)), array)
        return number + 1

    def load(self, place: int, specs: Sequence[ArraySpec]) -> list[Array]:
        """Return the arrays at a place as views of a segment, which is not written to while a view exists. Raise
        LinkFrameError if there is no such segment, it still has views, or the arrays do not fit into it."""
        number = place - 1
        *starts, total_bytes = _starts([spec.size_bytes for spec in specs])
        if number >= self._count or number in self._lent:
            state = "is in use" if number in self._lent else "does not exist"
            raise LinkFrameError(f"expected a free segment of {self._count}, got number {number}, which {state}")
        if total_bytes > self._segment_bytes:
            raise LinkFrameError(f"expected arrays in a segment of {self._segment_bytes} bytes, got {total_bytes}")
        memory = self._view(self._far, number)
        self._lent.add(number)
        # Views of views keep the owner of the memory alive: the array `memory`, which is not a view itself.
        weakref.finalize(memory, self._give_back, number, os.getpid()).atexit = False
        return [_as(memory, start, spec) for start, spec in zip(starts, specs, strict=True)]

    def forget(self) -> None:
        """Release this process's access. Existing views stay valid."""
        self._returns.close()

    def _view(self, memory: mmap.mmap, number: int) -> _Bytes:
        return np.frombuffer(memory, np.uint8, self._segment_bytes, number * self._segment_bytes)

    def _give_back(self, number: int, pid: int) -> None:
        if pid != os.getpid():  # a forked process has copies of views, but only its parent may return the segment
            return
        self._lent.discard(number)
        with contextlib.suppress(OSError):  # the link has ended
            self._returns.send(bytes((number,)))

    def _collect(self) -> None:
        with contextlib.suppress(OSError):
            for number in self._returns.recv(MAX_SEGMENTS):
                if number >= self._count or number in self._free:
                    raise LinkFrameError(f"expected the return of a segment in use, of {self._count}, got {number}")
                self._free.append(number)


def segments_pair(count: int, segment_bytes: int, min_bytes: int = MIN_BYTES) -> tuple[LinkSegments, LinkSegments]:
    """Create the segments of a link, for both of its ends; call it before the fork.

    Memory for a part of a segment is allocated at the first write to this part, and is kept until the link ends.

    Args:
        count: number of segments in each direction, 1 to `MAX_SEGMENTS`.
        segment_bytes: size of the largest message in a segment; rounded up to whole pages.
        min_bytes: size below which messages are not stored in segments.

    Raises:
        DollError: the system has no address space for the segments.
    """
    if not 1 <= count <= MAX_SEGMENTS or segment_bytes < 1:
        raise ValueError(
            f"expected 1 to {MAX_SEGMENTS} segments of at least 1 byte, got {count} of {segment_bytes} bytes"
        )
    segment_bytes = -(-segment_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        forward, backward = (mmap.mmap(-1, count * segment_bytes) for _ in range(2))
    except OSError as exc:
        raise DollError(
            f"expected shared memory for 2 x {count} segments of {segment_bytes} bytes: {exc.strerror}; use fewer or "
            "smaller segments"
        ) from exc
    one, other = socket.socketpair()
    return (
        LinkSegments(one, forward, backward, segment_bytes=segment_bytes, min_bytes=min_bytes),
        LinkSegments(other, backward, forward, segment_bytes=segment_bytes, min_bytes=min_bytes),
    )


def _starts(sizes_bytes: Sequence[int]) -> list[int]:
    """Return the start of each array of these sizes in a segment, and the end of the last array."""
    starts, end = [], 0
    for size_bytes in sizes_bytes:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        starts.append(start)
        end = start + size_bytes
    return [*starts, end]


def _as(memory: _Bytes, start: int, spec: ArraySpec) -> Array:
    return memory[start : start + spec.size_bytes].view(spec.dtype).reshape(spec.shape)
