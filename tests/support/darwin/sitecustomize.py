"""Linux without what macOS lacks: put this folder on PYTHONPATH, and every interpreter that starts is such a one.

What macOS has no name for is gone from the modules of the standard library; /proc, /sys and /dev/shm are not there;
paths of Unix sockets have 103 bytes; `multiprocessing` spawns. Where macOS has another call with the same effect it
answers. Code in C, such as that of librdkafka or uvloop, sees Linux.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import fnmatch
import os
import select
import selectors
import signal
import socket
import struct
import sys
import sysconfig
import tempfile
import time
import types
from typing import Any

sysconfig.get_config_vars()  # from a module that is named for the system
sys.platform = "darwin"

_LINUX_ONLY: dict[types.ModuleType, tuple[str, ...]] = {
    os: (
        "CLONE_*", "EFD_*", "GRND_*", "MFD_*", "O_DIRECT", "O_LARGEFILE", "O_NOATIME", "O_PATH", "O_RSYNC", "O_TMPFILE",
        "P_PIDFD", "POSIX_FADV_*", "SCHED_BATCH", "SCHED_IDLE", "SPLICE_*", "XATTR_*", "copy_file_range", "eventfd",
        "fdatasync", "getrandom", "getresgid", "getresuid", "getxattr", "listxattr", "memfd_create", "pidfd_open",
        "pipe2", "posix_fadvise", "posix_fallocate", "removexattr", "sched_getaffinity", "sched_getparam",
        "sched_getscheduler", "sched_rr_get_interval", "sched_setaffinity", "sched_setparam", "sched_setscheduler",
        "setns", "setresgid", "setresuid", "setxattr", "splice", "unshare",
    ),
    signal: (
        "SIGCLD", "SIGPOLL", "SIGPWR", "SIGRTMAX", "SIGRTMIN", "SIGSTKFLT", "pidfd_send_signal", "sigtimedwait",
        "sigwaitinfo",
    ),
    socket: (
        "AF_ALG", "AF_NETLINK", "AF_PACKET", "AF_TIPC", "AF_VSOCK", "MSG_CMSG_CLOEXEC", "MSG_CONFIRM", "MSG_ERRQUEUE",
        "MSG_MORE", "MSG_NOSIGNAL", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "SO_BINDTODEVICE", "SO_DOMAIN", "SO_MARK",
        "SO_PASSCRED", "SO_PEERCRED", "SO_PEERSEC", "SO_PRIORITY", "SO_PROTOCOL", "TCP_CORK", "TCP_DEFER_ACCEPT",
        "TCP_INFO", "TCP_KEEPIDLE", "TCP_LINGER2", "TCP_QUICKACK", "TCP_SYNCNT", "TCP_USER_TIMEOUT",
        "TCP_WINDOW_CLAMP",
    ),
    select: ("EPOLL*", "epoll"),
    fcntl: ("F_ADD_SEALS", "F_GETPIPE_SZ", "F_GET_SEALS", "F_OFD_*", "F_SEAL_*", "F_SETPIPE_SZ", "F_[GS]ETSIG"),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI", "pthread_getcpuclockid"),
}  # fmt: skip
_LIBC_LACKS = ("epoll_", "eventfd", "inotify_", "mallopt", "malloc_trim", "memfd_create", "prctl", "timerfd_")
_MISSING_FOLDERS = ("/proc", "/sys", "/dev/shm")
_MAX_SOCKET_PATH_BYTES = 103
_SO_PEERCRED = 17
_XUCRED = struct.Struct("=IIh2x16I")


def _is_missing(path: object) -> bool:
    name = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    return any(name == folder or name.startswith(f"{folder}/") for folder in _MISSING_FOLDERS)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename") and _is_missing(arguments[0]):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])


def _without_missing_folders(name: str) -> None:
    """Calls that no audit event announces."""
    call = getattr(os, name)

    def checked(path: Any, *arguments: Any, **keywords: Any) -> Any:
        if _is_missing(os.fspath(path) if isinstance(path, os.PathLike) else path):
            if name == "access":
                return False
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return call(path, *arguments, **keywords)

    setattr(os, name, checked)


class _Socket(socket.socket):
    """Short paths of Unix sockets, and LOCAL_PEERCRED instead of SO_PEERCRED."""

    def bind(self, address: Any, /) -> None:
        _check_address(self, address)
        super().bind(address)

    def connect(self, address: Any, /) -> None:
        _check_address(self, address)
        super().connect(address)

    def getsockopt(self, level: int, option: int, *size: int) -> Any:
        if (self.family, level, option) != (socket.AF_UNIX, 0, 1):
            return super().getsockopt(level, option, *size)
        _, user, group = struct.unpack("3i", super().getsockopt(socket.SOL_SOCKET, _SO_PEERCRED, 12))
        return _XUCRED.pack(0, user, 1, group, *[0] * 15)[: size[0]]


def _check_address(unix: socket.socket, address: Any) -> None:
    if unix.family == socket.AF_UNIX:
        path = os.fsencode(address)
        if path.startswith(b"\0") or len(path) > _MAX_SOCKET_PATH_BYTES:
            raise OSError("AF_UNIX path too long")


def _lacking(library: ctypes.CDLL, name: str) -> Any:
    if name.startswith(_LIBC_LACKS):
        raise AttributeError(f"dlsym: symbol not found: {name}")
    return _of_library(library, name)


for module, names in _LINUX_ONLY.items():
    for attribute in list(vars(module)):
        if any(fnmatch.fnmatchcase(attribute, name) for name in names):
            delattr(module, attribute)
_of_library = ctypes.CDLL.__getattr__
ctypes.CDLL.__getattr__ = _lacking  # type: ignore[method-assign]
for call_name in ("access", "lstat", "stat", "statvfs"):
    _without_missing_folders(call_name)
socket.socket = _Socket  # type: ignore[misc]
selectors.DefaultSelector = selectors.PollSelector  # type: ignore[assignment, misc]
# urllib asks the system for its proxies by a module that only macOS has.
sys.modules["_scproxy"] = types.SimpleNamespace(_get_proxies=dict, _get_proxy_settings=dict)  # type: ignore[assignment]
tempfile.tempdir = None
sys.addaudithook(_audit)
