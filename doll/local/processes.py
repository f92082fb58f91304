"""Start child processes and servers that end with this process; find free ports, read log tails, name exit codes."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, Final, Self

from doll.errors import ServiceUnavailableError
from doll.local import launcher
from doll.process.platform import IS_LINUX

LOOPBACK: Final = "127.0.0.1"
# Below Linux's ephemeral range (32768 and up), so that no outgoing connection takes a port while its server restarts.
_PORTS: Final = range(20_000, 32_000)
_given: Final[deque[int]] = deque(maxlen=1_000)
_TAIL_BYTES: Final = 16_384
_BIND_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class Host:
    """The host at which a local server listens."""

    address: str = LOOPBACK  # address at which it listens, and which it tells its clients
    # Words before its command that start it in a separate network namespace; its process id does not change.
    prefix: tuple[str, ...] = ()


THIS_HOST: Final = Host()
die_with_parent: Final = launcher.die_with_parent  # for forked processes; `parent_pid` is read before the fork


def tied(argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` and is killed when this process ends, as `spawn` describes."""
    watched = () if IS_LINUX else (launcher.WATCH,)
    return [sys.executable, "-I", "-S", launcher.__file__, *watched, str(os.getpid()), *argv]


def spawn(
    argv: Sequence[str],
    log_path: Path,
    env: Mapping[str, str] | None = None,
    *,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process that is killed when this one ends. Ctrl-C in the terminal does not reach it.

    Linux kills it when the calling thread ends, so call this from a thread that lives long enough. On macOS it is
    killed within half a second after the end of this process.

    Args:
        log_path: file to which standard error, and standard output unless `stdout` is given, are appended.
        env: additional environment variables.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return subprocess.Popen(
            tied(argv),
            stdin=stdin,
            stdout=log if stdout is None else stdout,
            stderr=log,
            env={**os.environ, **(env or {})},
            pass_fds=pass_fds,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """Send SIGTERM, and SIGKILL after `grace_s` seconds. Return the exit code. The call may be repeated."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def free_port() -> int:
    """Return a loopback port that is free now. A server requests several ports before it binds them, so ports that were
    returned recently are not returned again. Another process may bind the port first, so callers retry a failed
    bind."""
    for port in random.SystemRandom().sample(_PORTS, 200):
        if port in _given:
            continue
        if is_free(port):
            _given.append(port)
            return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Return whether a server could bind this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def tail(log_path: Path, lines: int = 15) -> str:
    """Return the last lines of a log file, or a note in parentheses if it has none."""
    try:
        with log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:]) or "(its log is empty)"


def describe_exit(code: int) -> str:
    """Return `exit code 3`, or the name of the signal that ended a process."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


@cache
def version_of(executable: str, option: str, pattern: str) -> tuple[int, ...]:
    """Return the numbers that the groups of `pattern` find in the version that a program prints with this option; () if
    the version cannot be determined."""
    try:
        completed = subprocess.run([executable, option], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(pattern, completed.stderr + completed.stdout)
    return tuple(map(int, match.groups())) if match else ()


class Server(ABC):
    """A server that can be started and stopped. Use it as a context manager, or call `start` and `stop`."""

    @abstractmethod
    def start(self) -> None:
        """Start the server, and return after it answers. Raise ServiceUnavailableError, which contains its log, if it
        is not installed or does not start."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the server with SIGTERM, or with SIGKILL after a grace period. The call may be repeated."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL and wait for the exit."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.kill()  # second Ctrl-C: do not wait for an orderly end
        else:
            self.stop()


class LocalServer(Server):
    """A server process with a log. Subclasses set `_process` in `start`."""

    _grace_s: ClassVar[float]  # time from SIGTERM to SIGKILL

    def __init__(self, log_path: Path) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0  # kept over restarts
        self.log_path = log_path

    @property
    def pid(self) -> int | None:
        """The process id while the server runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def terminate(self) -> None:
        """Send SIGTERM without waiting."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self, grace_s: float | None = None) -> None:
        if self._process is not None:
            end(self._process, self._grace_s if grace_s is None else grace_s)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self) -> None:
        """Stop the server if it runs, and start it again."""
        self.stop()
        self.start()

    def _start_on_port(self, name: str, launch: Callable[[int], bool], tries: int = _BIND_TRIES) -> None:
        """Launch the server on its earlier port or a free port. If the port is taken meanwhile, retry."""
        for _ in range(tries):
            port = self._port or free_port()
            if launch(port):
                self._port = port
                return
        raise ServiceUnavailableError(f"{name} does not start; the end of {self.log_path}:\n{tail(self.log_path)}")

    def _await(self, serves: Callable[[], bool], timeout_s: float, *, every_s: float) -> bool:
        """Return whether the server answers before its process exits and in time. If it does not, kill it."""
        deadline_s = time.monotonic() + timeout_s
        while self.pid is not None and time.monotonic() < deadline_s:
            if serves():
                return True
            time.sleep(every_s)
        self.kill()
        return False
