"""Wrap the calls of the operating system that differ between Linux, macOS and Windows.

All roles run on Linux. On macOS they are separate processes instead of forks, and there is no death signal
(`doll.local.launcher` has a replacement). On Windows only commands work that start no process. The modules that these
commands import must run on Windows, so only this module imports `fcntl`.
"""

from __future__ import annotations

import io
import os
import socket
import struct
import sys
from contextlib import suppress
from typing import Final

from doll.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOWEST_NICENESS: Final = 19
IS_LINUX: Final = sys.platform.startswith("linux")
# A process that has loaded torch may be forked. On macOS its libraries (Accelerate, Grand Central Dispatch) may end
# such a child; multiprocessing stopped forking there with Python 3.8.
CAN_FORK: Final = IS_LINUX

_LINUX_CREDENTIALS: Final = struct.Struct("3i")  # SO_PEERCRED: process, user, group
_PIPE_BYTES: Final = 1 << 16  # maximum content of a pipe
_SOL_LOCAL: Final = 0  # <sys/un.h> of macOS
_LOCAL_PEERCRED: Final = 1
_XUCRED: Final = struct.Struct("=II")  # struct xucred begins with its version and the user
_XUCRED_BYTES: Final = 76


def print_any_text() -> None:
    """Make standard output escape characters that its encoding lacks, as standard error does. Reports contain a λ."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def require_fork() -> None:
    """Raise ConfigError if processes that have loaded torch cannot be forked here."""
    if not CAN_FORK:
        raise ConfigError(
            "worker.pipeline: expected Linux: the stages of a worker are its forks, which libraries of this system may "
            "end at any time; run the job in containers, or without worker.pipeline"
        )


def lower_priority(niceness: int = LOWEST_NICENESS) -> None:
    """Lower the priority of this process, and of the threads that it starts, to that of `niceness`. Lower priorities,
    and all of Windows, stay as they are."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))


def yield_to_others() -> None:
    """Give this process only the processor time that no other process wants (Linux), or the lowest priority."""
    lower_priority()
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class WakeUp:
    """A pipe by which one thread wakes a selector in another thread. Register it for reading.

    All systems have pipes. Linux's eventfd would save a descriptor.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        """Make the pipe readable. Raise OSError if it is closed."""
        with suppress(BlockingIOError):  # the pipe is full, so it is readable
            os.write(self._write, b"\0")

    def clear(self) -> bool:
        """Make the pipe unreadable until the next `set`, and return whether it was readable."""
        try:
            os.read(self._read, _PIPE_BYTES)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def lock_exclusively(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file or folder against other processes, and return whether this process has the lock. Closing the
    descriptor releases it. `wait`: wait for the lock. Raise ConfigError on Windows."""
    if fcntl is None:
        raise ConfigError("expected Linux or macOS: Windows has no locks of files that end with their process")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def sync(descriptor: int) -> None:
    """Make a file's content, or the names in a folder, survive a power failure. Raise OSError if the disk fails or is
    full."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: its fsync leaves the data in the disk's cache
        with suppress(OSError):  # a file system that has no such request
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket. Raise OSError if the system does not return
    it."""
    if hasattr(socket, "SO_PEERCRED"):
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _LINUX_CREDENTIALS.size)
        return int(_LINUX_CREDENTIALS.unpack(credentials)[1])
    credentials = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_BYTES)
    return int(_XUCRED.unpack_from(credentials)[1])
