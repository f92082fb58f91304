"""`doll` as a program of its own that has not to load what it imports: it is forked from the session's fork server.

A run of `doll up` takes 10 s of CPU time for imports alone, in its own process and in its fork server. A test that is
about the start itself (a new interpreter, standard input) has a plain subprocess instead: tests/e2e/test_up.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from doll.local import forkserver
from doll.local.forks import PRELOAD, ForkServer, Role
from doll.local.processes import die_with_parent
from doll.process.platform import CAN_FORK
from doll.services import Services

# What the fork server of the session loads: its roles' modules and the command line's.
# Making an optimizer of torch's classes imports torch._dynamo, which takes 2 s.
LOADED: Final = (
    *PRELOAD, "torch._dynamo", "doll.cli.app", "doll.run.local.up", "doll.run.local.resume", "doll.run.local.regrid",
    "doll.run.local.compare", "doll.ps.regrid", "doll.ps.rollback",
    "doll.dashboard.saved_page",
)  # fmt: skip
_LIMIT_S: Final = 800.0


def environment(services: Services) -> dict[str, str]:
    """The variables that name these services, in place of those that a run would start."""
    return {"DOLL_KAFKA": services.kafka, "DOLL_REDIS": services.redis}


class Command:
    """A command that was started, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, role: Role, out: Path, err: Path) -> None:
        self._role, self._out, self._err = role, out, err
        self.pid = role.pid

    @property
    def returncode(self) -> int | None:
        return self._role.exitcode

    def poll(self) -> int | None:
        return self._role.poll()

    def wait(self, timeout: float = _LIMIT_S) -> int:
        code = self._role.wait(timeout)
        if code is None:
            self.kill()
            raise AssertionError(f"not within {timeout:g} s: the end of a command, which said {self._said()}")
        return code

    def send_signal(self, number: int) -> None:
        self._role.send_signal(number)

    def kill(self) -> None:
        self._role.kill()

    def communicate(self, timeout: float = _LIMIT_S) -> tuple[str, str]:
        """Standard output and error, after its end."""
        self.wait(timeout)
        return self._said()

    def finished(self) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` returns it, after its end."""
        out, err = self.communicate()
        return subprocess.CompletedProcess((), self.wait(), out, err)

    def _said(self) -> tuple[str, str]:
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in (self._out, self._err))
        return out, err


class Program:
    """`doll`, with this process's environment and what a call adds to it.

    Args:
        forks: has loaded `LOADED`.
        folder: for standard output and error.
    """

    def __init__(self, forks: ForkServer, folder: Path) -> None:
        self._forks, self._folder = forks, folder
        self._started: list[Command] = []

    def start(
        self, *arguments: str | Path, out: str | Path = "", err: str | Path = "", cwd: str | Path = "/", **env: str
    ) -> Command:
        """Start a command. Its standard output and error are appended to `out` and `err`."""
        number = len(self._started)
        out, err = Path(out or self._folder / f"out-{number}"), Path(err or self._folder / f"err-{number}")
        for path in (out, err):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        command = [[str(argument) for argument in arguments], str(cwd), str(out), str(err), {**os.environ, **env}]
        role = self._forks.start_role("forked_commands:run", command, log_path=err, name="doll")
        self._started.append(Command(role, out, err))
        return self._started[-1]

    def __call__(self, *arguments: str | Path, cwd: str | Path = "/", **env: str) -> subprocess.CompletedProcess[str]:
        """A command, to its end."""
        return self.start(*arguments, cwd=cwd, **env).finished()

    def close(self) -> None:
        """Kill what still runs, with all that it has started."""
        for command in self._started:
            command.kill()


def run(arguments: list[str], cwd: str, out: str, err: str, env: Mapping[str, str]) -> None:
    """The command, in the process that was forked for it; it exits as a program does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    for path, to in ((out, 1), (err, 2)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(descriptor, to)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["doll", *arguments]
    if CAN_FORK:
        cast(Any, ForkServer).start = _start
    from doll.cli import main

    main()


def _start(server: ForkServer) -> None:
    """As `ForkServer.start`, by a fork of this process."""
    if server._process is not None:
        return
    own_end, child_end = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        own_end.close()
        _serve(child_end.detach(), server._preload, server._log_path, parent)
    child_end.close()
    server._socket, server._process = own_end, cast("subprocess.Popen[bytes]", _Child(pid))


def _serve(descriptor: int, preload: Sequence[str], log_path: Path, parent: int) -> None:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(parent)
        os.setsid()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = forkserver.main([str(descriptor), *preload])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _Child:
    """What `ForkServer` needs of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                done, status = os.waitpid(self.pid, options)
                self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode
