"""Links between neighbours of a pipeline: stream sockets, with or without shared memory (ADR 0040). Links between
machines are opened by `doll.pipeline.links.tcp`.

Neighbours send activations forward and gradients backward at the same time. Each end has a thread that always receives,
so a sender waits only for a copy, never for the computation of the other end. Without this thread, two ends that both
send more than fits into the socket buffers would wait for each other.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from doll.errors import DollError
from doll.pipeline.links import frames
from doll.pipeline.links.frames import Array, LinkFrameError
from doll.pipeline.links.segments import ALIGNMENT_BYTES, MIN_BYTES, LinkSegments, segments_pair

DEFAULT_MAX_MESSAGE_BYTES: Final = 1 << 30
# Above net.core.wmem_max, the kernel uses a smaller buffer.
_BUFFER_BYTES: Final = 1 << 20


class LinkClosedError(DollError):
    """The link has ended: the other end is closed, its process has died, or this end is closed."""


class StageLink:
    """One end of a link between two processes, over a connected stream socket: a pair of Unix sockets, or TCP.

    Messages arrive complete and in order, or the link ends. Only one thread at a time sends, other senders wait; only
    one thread at a time may receive.

    Args:
        connection: the socket; the link owns it from now on.
        max_message_bytes: maximum size of the arrays of a message, in both directions.
        segments: shared memory for large messages. A segment stays in use while the receiver keeps its message. If no
            segment is free, or a message is larger than a segment, the message goes through the socket. None: all
            messages go through the socket.
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
        self._is_cut = False  # True: the next bytes are not the beginning of a message
        # Reentrant, because a signal handler may call `close` in the thread that sends.
        self._sending = threading.RLock()
        self._receiving = threading.RLock()

    def limit_sending(self, seconds: float) -> None:
        """Limit the wait of `send`. If the other end reads nothing for so long, `send` ends the link. Default: none."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))

    def limit_receiving(self, seconds: float) -> None:
        """Limit the wait of `receive` for the next bytes, also of a new message. After this time without any byte,
        `receive` ends the link. Default: none."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    def send(self, header: bytes, arrays: Sequence[Array] = ()) -> None:
        """Send a message. Wait while the buffers between the ends are full. After the call, the arrays may be changed.

        Args:
            header: header of at most `frames.MAX_HEADER_BYTES`.
            arrays: at most `frames.MAX_ARRAYS` arrays of any shape and strides, with the types `frames.DTYPES`.

        Raises:
            LinkClosedError: the link has ended, so nobody will receive the message.
            LinkFrameError: the message exceeds a limit. Nothing was sent, and the link stays open.
        """
        sent = [frames.as_sent(np.asarray(array)) for array in arrays]
        head = frames.encode(header, sent, self._max_message_bytes)
        with self._sending:
            try:
                if self._segments is not None and (place := self._segments.store(sent)):
                    head, sent = frames.at_place(head, place), []
                self._write([memoryview(head), *(frames.bytes_of(array) for array in sent)])
            except BaseException as exc:
                self._end()  # the message is incomplete, so no other message may follow it
                if isinstance(exc, BlockingIOError):
                    raise self._closed("it has taken nothing for as long as a sender waits") from exc
                if isinstance(exc, OSError):
                    raise self._closed(exc.strerror or str(exc)) from exc
                raise

    def try_send(self, header: bytes) -> bool:
        """Send a small message like `send`, unless another thread is sending or the socket is full. Return whether the
        message was sent."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            room = select.poll()
            room.register(self._socket, select.POLLOUT)
            if is_writable := bool(room.poll(0)):
                self.send(header)
            return is_writable
        except ValueError:  # it is closed
            return False
        finally:
            self._sending.release()

    def receive(self) -> tuple[bytes, list[Array]]:
        """Wait for the next message. Return its header and arrays; the caller may change and keep the arrays.

        Raises:
            LinkClosedError: the link has ended. All messages that arrived before were returned.
            LinkFrameError: the received bytes are not a message. The link has ended, at both ends.
        """
        with self._receiving:
            if self._is_cut:
                raise self._closed("a message before was cut or malformed")
            try:
                return self._read_message()
            except BlockingIOError as exc:
                self._is_cut = True
                self._end()
                raise self._closed("it has sent nothing for as long as a receiver waits") from exc
            except OSError as exc:
                raise self._closed(exc.strerror or str(exc)) from exc
            except LinkClosedError:
                raise
            except BaseException:  # it is unknown where the next message begins
                self._is_cut = True
                self._end()
                raise

    def fileno(self) -> int:
        """Return the file descriptor of the socket; readable when `receive` would return or raise. -1 after `close`."""
        return self._socket.fileno()

    def close(self) -> None:
        """End the link at both ends. Threads that send or receive get a LinkClosedError. May be called again."""
        self._is_closed = True
        self._end()
        # These threads end now. Wait for them; otherwise a newly opened file could get their file descriptor.
        with self._sending, self._receiving:
            self._forget()

    def forget(self) -> None:
        """Close this process's copy of this end; another process continues to use the end.

        A forked process has copies of all open ends. Each process must forget the ends that it does not own. While any
        copy is open, the other end does not notice the death of the owner.
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
            array = _aligned(spec)
            self._fill(frames.bytes_of(array), read_bytes)
            read_bytes += spec.size_bytes
            arrays.append(array)
        return header, arrays

    def _fill(self, view: memoryview, read_bytes: int) -> None:
        """Fill `view` with the next bytes. `read_bytes`: number of bytes of the message that were already read."""
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


def _timeval(seconds: float) -> bytes:
    """Return a time limit for the kernel; the socket stays blocking."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _aligned(spec: frames.ArraySpec) -> Array:
    """Return memory for an array, aligned as in a segment: kernels may add in another order at other addresses."""
    memory = np.empty(spec.size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + spec.size_bytes].view(spec.dtype).reshape(spec.shape)


def socket_pair(max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> tuple[StageLink, StageLink]:
    """Create both ends of a link between local processes. Call it before the fork (see `StageLink.forget`)."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return StageLink(one, max_message_bytes), StageLink(other, max_message_bytes)


def shared_pair(
    segments: int,
    segment_bytes: int,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    min_bytes: int = MIN_BYTES,
) -> tuple[StageLink, StageLink]:
    """Create both ends of a link, as `socket_pair` does; large messages go through shared memory.

    Args:
        segments: number of segments in each direction. A stage keeps received messages until the backward pass: one
            segment for each minibatch in flight, and one or two for messages in transit.
        segment_bytes, min_bytes: as in `segments_pair`.

    Raises:
        DollError: the system has no address space for the segments.
    """
    shared = segments_pair(segments, segment_bytes, min_bytes)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return StageLink(one, max_message_bytes, shared[0]), StageLink(other, max_message_bytes, shared[1])
