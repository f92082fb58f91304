"""Links between neighbours of a pipeline: the port, and stream sockets, with or without shared memory (ADR 0040).

Neighbours send each other activations forward and gradients backward at the same time. Each end has one thread that
receives at all times, so that a sender waits for a copy, never for the other end's computation. Without that thread
two ends that send more than the buffers of the sockets hold wait for each other.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from doll.errors import DollError
from doll.pipeline.links import frames
from doll.pipeline.links.frames import Array, LinkFrameError
from doll.pipeline.links.segments import MIN_BYTES, LinkSegments, segments_pair

DEFAULT_MAX_MESSAGE_BYTES: Final = 1 << 30
# Beyond net.core.wmem_max the kernel takes less.
_BUFFER_BYTES: Final = 1 << 20


class LinkClosedError(DollError):
    """The link has ended: the other end is closed or its process has died, or this end is closed."""


class StageLink:
    """One end of a link between two processes, over a connected stream socket: a pair of Unix sockets, or TCP.

    Messages arrive whole and in order, or the link ends. One thread at a time sends (others wait for it), and one
    thread at a time receives.

    Args:
        connection: the link's from now on.
        max_message_bytes: limit of the arrays of a message, in both directions.
        segments: for large messages; one that is kept by the receiver keeps its segment, and when none is free or a
            message is larger than a segment, it goes through the socket. None: all go through the socket.
    """

    def __init__(
        self,
        connection: socket.socket,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        segments: LinkSegments | None = None,
    ) -> None:
        connection.settimeout(None)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._segments = segments
        self._max_message_bytes = max_message_bytes
        self._is_closed = False
        self._is_cut = False  # what is still to be read does not begin with a message
        # Reentrant: a signal handler may call `close` in the thread that sends.
        self._sending = threading.RLock()
        self._receiving = threading.RLock()

    def limit_sending(self, seconds: float) -> None:
        """Limit `send`: it ends the link when the other end takes nothing for so long; at first it waits."""
        timeval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))  # of the kernel: the socket still blocks
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def send(self, header: bytes, arrays: Sequence[Array] = ()) -> None:
        """Send a message; the arrays may be changed afterwards. Waits while the buffers between the ends are full.

        Args:
            header: at most `frames.MAX_HEADER_BYTES`.
            arrays: at most `frames.MAX_ARRAYS`, of any shape and strides, of the types `frames.DTYPES`.

        Raises:
            LinkClosedError: nobody will receive it.
            LinkFrameError: it is beyond a limit. Nothing was sent, and the link goes on.
        """
        sent = [frames.as_sent(np.asarray(array)) for array in arrays]
        head = frames.encode(header, sent, self._max_message_bytes)
        with self._sending:
            try:
                if self._segments is not None and (place := self._segments.store(sent)):
                    head, sent = frames.at_place(head, place), []
                self._write([memoryview(head), *(frames.bytes_of(array) for array in sent)])
            except BaseException as exc:
                self._end()  # the message is cut: nothing may follow it
                if isinstance(exc, BlockingIOError):
                    raise self._closed("it has taken nothing for as long as a sender waits") from exc
                if isinstance(exc, OSError):
                    raise self._closed(exc.strerror or str(exc)) from exc
                raise

    def receive(self) -> tuple[bytes, list[Array]]:
        """The next message: its header and arrays, which are the caller's, to change and to keep. Waits for it.

        Raises:
            LinkClosedError: there will be none. Messages that came before were returned.
            LinkFrameError: what came is no message. The link has ended, at both ends.
        """
        with self._receiving:
            if self._is_cut:
                raise self._closed("a message before was cut or malformed")
            try:
                return self._read_message()
            except OSError as exc:
                raise self._closed(exc.strerror or str(exc)) from exc
            except LinkClosedError:
                raise
            except BaseException:  # where the next message begins is unknown
                self._is_cut = True
                self._end()
                raise

    def fileno(self) -> int:
        """Readable when `receive` would return or raise; -1 after `close`."""
        return self._socket.fileno()

    def close(self) -> None:
        """End the link at both ends; threads that send or receive get a LinkClosedError. May be repeated."""
        self._is_closed = True
        self._end()
        # They end now. Without waiting for them, a file that is opened next could get the number that they use.
        with self._sending, self._receiving:
            self._forget()

    def forget(self) -> None:
        """Close what this process has of this end, which another process goes on using.

        A process that is forked has copies of all open ends. Each process must forget the ends that are not its own: as
        long as one has a copy, the other end does not see that the owner has died.
        """
        # Another thread may have held a lock when this process was forked.
        self._is_closed = True
        self._forget()

    def _forget(self) -> None:
        self._socket.close()
        if self._segments is not None:
            self._segments.forget()

    def _write(self, parts: list[memoryview]) -> None:
        while parts:
            sent = self._socket.sendmsg(parts)  # Python ignores SIGPIPE
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def _read_message(self) -> tuple[bytes, list[Array]]:
        data = bytearray(frames.PREFIX_BYTES)
        self._fill(memoryview(data), 0)
        prefix = frames.decode_prefix(data, self._max_message_bytes)
        if prefix.place and self._segments is None:
            raise LinkFrameError(f"expected the arrays in the frame (place 0), got place {prefix.place}")
        data = bytearray(prefix.rest_bytes)
        self._fill(memoryview(data), frames.PREFIX_BYTES)
        header, specs = frames.decode_rest(prefix, data)
        if prefix.place and self._segments is not None:
            return header, self._segments.load(prefix.place, specs)
        arrays: list[Array] = []
        read_bytes = frames.PREFIX_BYTES + prefix.rest_bytes
        for spec in specs:
            array = np.empty(spec.shape, spec.dtype)
            self._fill(frames.bytes_of(array), read_bytes)
            read_bytes += spec.size_bytes
            arrays.append(array)
        return header, arrays

    def _fill(self, view: memoryview, read_bytes: int) -> None:
        """
        Args:
            read_bytes: of the message so far.
        """
        while view:
            count = self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
            if not count:
                raise self._closed("it has closed the link, or its process has ended", read_bytes)
            view = view[count:]
            read_bytes += count

    def _closed(self, why: str, read_bytes: int = 0) -> LinkClosedError:
        if self._is_closed:
            return LinkClosedError("expected an open link: this end is closed")
        where = f" in the middle of a message, after {read_bytes} bytes" if read_bytes else ""
        return LinkClosedError(f"expected the other end of the link, which is gone{where}: {why}")

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def socket_pair(max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> tuple[StageLink, StageLink]:
    """Both ends of a link between processes of this machine; create it before the fork (see `StageLink.forget`)."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return StageLink(one, max_message_bytes), StageLink(other, max_message_bytes)


def shared_pair(
    segments: int,
    segment_bytes: int,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    min_bytes: int = MIN_BYTES,
) -> tuple[StageLink, StageLink]:
    """Make a pair as `socket_pair` does, with large messages in shared memory.

    Args:
        segments: in each direction. A stage keeps what it has received until the backward pass: one for each minibatch
            in flight, and one or two on their way.
        segment_bytes, min_bytes: as of `segments_pair`.

    Raises:
        DollError: the system has no address space for them.
    """
    shared = segments_pair(segments, segment_bytes, min_bytes)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return StageLink(one, max_message_bytes, shared[0]), StageLink(other, max_message_bytes, shared[1])
