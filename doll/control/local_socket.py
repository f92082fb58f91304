"""Control links over a Unix socket, for processes on the same machine. Both ends are a `SocketLink`.

The socket is in a folder that only this user may enter. Both ends check the folder: a worker gets the path from a
record, and another user who can write to the folder could impersonate the server. On the socket, each frame comes after
its length (4 bytes, big-endian).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from doll.control.link_state import MAX_FRAME_BYTES, Link, LinkError, LinkState
from doll.errors import ServiceUnavailableError
from doll.process.files import folder_problem
from doll.process.platform import peer_user
from doll.records.control import AnyRecord

_LENGTH: Final = struct.Struct(">I")
_READ_BYTES: Final = 1 << 16
_MAX_READS: Final = 16  # in one call, so that one end cannot block the other's event loop
_MAX_UNSENT_BYTES: Final = 2 * MAX_FRAME_BYTES
_MAX_PATH_BYTES: Final = 100  # sun_path has 108 on Linux, 104 on macOS
_BACKLOG: Final = 512
_CONNECT_S: Final = 1.0


def next_frame(unread: bytearray) -> bytes | None:
    """Remove the next frame from `unread`, the bytes received so far, and return it; None if the frame is incomplete.
    Raise LinkError if its length is above the limit."""
    if len(unread) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(unread)
    if length > MAX_FRAME_BYTES:
        raise LinkError(f"expected a frame of at most {MAX_FRAME_BYTES} bytes, got {length}", is_refusal=True)
    end = _LENGTH.size + length
    if len(unread) < end:
        return None
    frame = bytes(unread[_LENGTH.size : end])
    del unread[:end]
    return frame


class SocketLink(Link):
    """One end of a link over `connection`, which this object owns and closes. If the socket does not accept all bytes
    now, a later call sends the rest."""

    kind = "local"

    def __init__(self, connection: socket.socket, state: LinkState) -> None:
        super().__init__(state)
        connection.setblocking(False)
        self._socket = connection
        self._unread = bytearray()
        self._unsent = bytearray()
        self._is_ended = False  # the other end has closed the connection

    def fileno(self) -> int:
        return self._socket.fileno()

    def filenos(self) -> tuple[int, ...]:
        return (self._socket.fileno(),)

    def send(self, record: AnyRecord, now: float) -> None:
        frame = self._state.pack(record, now)
        self._unsent += _LENGTH.pack(len(frame))
        self._unsent += frame
        self._flush()
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            raise LinkError(f"{len(self._unsent)} bytes are waiting: the other end does not read")

    def check(self, now: float) -> None:
        super().check(now)
        self._flush()

    def _frames(self, now: float) -> Iterator[bytes]:
        self._read()
        while (frame := next_frame(self._unread)) is not None:
            yield frame
        if self._is_ended:
            raise LinkError("connection closed by the other end")

    def _read(self) -> None:
        for _ in range(_MAX_READS):
            try:
                data = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                raise LinkError(f"connection broken: {exc.strerror or exc}") from exc
            self._is_ended = not data
            self._unread += data
            if len(data) < _READ_BYTES:
                return

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                raise LinkError(f"connection broken: {exc.strerror or exc}") from exc
            del self._unsent[:sent]

    def _release(self) -> None:
        self._socket.close()


class LocalSocket:
    """The listening socket of a parameter server, at `path` (see `Services.control`). If `path` is empty, the path is
    derived from `identity`, which identifies the job among the jobs of this user. All servers of a job on this machine
    have the same path.

    A later server takes over the path. A socket that a killed server left behind is replaced. Raises
    ServiceUnavailableError if the folder belongs to another user or is open to others, or if the path is too long.
    """

    def __init__(self, path: str, identity: str) -> None:
        name = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        self.path = Path(path) if path else _private_folder() / f"{name}.sock"
        _require_private(self.path.parent)
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            raise ServiceUnavailableError(
                f"{self.path}: expected the path of a socket of at most {_MAX_PATH_BYTES} bytes; set $TMPDIR to a "
                "shorter folder"
            )
        unfinished = self.path.with_suffix(f".{os.getpid() % 10**6}")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
            self._socket.bind(str(unfinished))
            self._socket.listen(_BACKLOG)
            self._inode = os.stat(unfinished).st_ino
            os.rename(unfinished, self.path)
        except OSError as exc:
            self._socket.close()
            raise ServiceUnavailableError(
                f"cannot listen on {self.path}: {exc.strerror}; set control.kind: redis, or $TMPDIR to a folder for it"
            ) from exc

    def fileno(self) -> int:
        """Return the file descriptor, which becomes readable when a worker connects."""
        return self._socket.fileno()

    def accept(self) -> socket.socket | None:
        """Return a new connection; None if no worker waits. Raise OSError if this process has no free descriptor or
        memory; the worker then continues to wait."""
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return None
        return connection

    def close(self) -> None:
        """Stop listening. Remove the socket, unless a later server has taken over its path."""
        self._socket.close()
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)


def connect(path: str) -> socket.socket:
    """Return a connection to the socket at `path`, on which a process of this user must listen. Sends nothing. Raise
    LinkError if no process listens. Raise LinkError as a refusal if the folder, the socket or the listening process
    belongs to another user, or if other users may enter the folder."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_S)
    try:
        if problem := folder_problem(Path(path).parent) or _socket_problem(path):
            raise LinkError(problem, is_refusal=True)
        connection.connect(path)
        # The path may have changed since the check, so the user of the listening process decides.
        user = peer_user(connection)
        if user != os.geteuid():
            raise LinkError(
                f"{path}: expected a process of user {os.geteuid()} to listen, got one of user {user}", is_refusal=True
            )
    except OSError as exc:
        connection.close()
        raise LinkError(f"cannot connect to {path}: {exc.strerror or exc}") from exc
    except LinkError:
        connection.close()
        raise
    return connection


def _private_folder() -> Path:
    """Return the folder `doll-<user>` in the temporary folder or, if its name is too long, in /tmp; create it."""
    name = f"doll-{os.geteuid()}"
    folder = Path(tempfile.gettempdir()) / name
    if len(os.fsencode(folder)) > _MAX_PATH_BYTES - 40:
        folder = Path("/tmp") / name
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    return folder


def _require_private(folder: Path) -> None:
    try:
        problem = folder_problem(folder)
    except OSError as exc:
        raise ServiceUnavailableError(f"{folder}: expected a folder for the control socket: {exc.strerror}") from exc
    if problem:
        raise ServiceUnavailableError(f"{problem}; remove it, or set control.kind: redis")


def _socket_problem(path: str) -> str:
    """Return the problem of the socket itself, in the form of `folder_problem`; "" if there is none."""
    status = os.lstat(path)
    if stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid():
        return ""
    return (
        f"{path}: expected a socket of user {os.geteuid()}, got mode {stat.filemode(status.st_mode)} of user "
        f"{status.st_uid}"
    )
