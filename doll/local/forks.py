"""Start DOLL's roles (worker, parameter server, ...) by forking a process that has imported torch."""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from doll.errors import ServiceUnavailableError
from doll.local import processes
from doll.local.supervisor import RoleSpec
from doll.process.platform import CAN_FORK

# Imported once, in the fork server, so that a role's own imports of them are free. Modules that fail are skipped.
PRELOAD: Final = (
    "torch", "torch.optim", "numpy", "redis", "confluent_kafka",
    "doll.task.base", "doll.config", "doll.run.local.roles",
    "doll.ps.main", "doll.consumers.main", "doll.evaluation.main", "doll.producers.main",
)  # fmt: skip
# One thread each: N processes with one thread per core would contend for the cores.
_ONE_THREAD: Final = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
_START_S: Final = 120.0  # importing torch takes 7 s, and far longer from a cold disk
_LOST_EXIT_CODE: Final = -9  # SIGKILL, which Windows' signal module lacks


class Role:
    """One forked process. Its exit code is negative if a signal ended it, as with `subprocess`."""

    def __init__(self, server: ForkServer, pid: int, name: str, log_path: Path) -> None:
        self._server = server
        self.pid: Final = pid
        self.name: Final = name
        self.log_path: Final = log_path
        self.exitcode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code if it has exited, otherwise None."""
        self._server._read(0.0)
        return self.exitcode

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait at most `timeout_s` for the exit. Return the exit code, or None if it still runs."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self.poll() is None:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            self._server._read(left_s)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, such as SIGSTOP or SIGCONT. After the exit this has no effect."""
        if self.poll() is None:
            self._server._send({"kill": self.pid, "signal": int(number)})

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A server that starts roles. `start` returns before torch is loaded. `close` kills the running roles and the
    server.

    Use it from one thread, which must live as long as the roles.
    """

    def __init__(self, log_path: Path, preload: Sequence[str] = PRELOAD) -> None:
        self._log_path = log_path
        self._preload = tuple(preload) if CAN_FORK else ()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._unread = b""
        self._roles: dict[int, Role] = {}
        self._started_pids: list[int] = []
        self._ended_early: dict[int, int] = {}  # exit codes of roles that ended before `start_role` returned

    @property
    def pid(self) -> int | None:
        """The process id of the fork server while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the process of the fork server, which begins to load the modules. A second call does nothing."""
        if self._process is not None:
            return
        own_end, child_end = socket.socketpair()
        with child_end:
            self._process = processes.spawn(
                [sys.executable, "-m", "doll.local.forkserver", str(child_end.fileno()), *self._preload],
                self._log_path,
                _ONE_THREAD,
                pass_fds=[child_end.fileno()],
            )
        self._socket = own_end

    def start_role(
        self, target: str, args: Sequence[Any] = (), *, log_path: Path, name: str, env: Mapping[str, str] | None = None
    ) -> Role:
        """Fork a process that calls `target` and exits with its result. It is killed when this process ends. Raise
        ServiceUnavailableError, which contains the log, if the fork server has exited or does not start.

        Args:
            target: `module:function`, imported in the child. It returns None or an exit code; an exception gives 1.
            args: JSON values: names, numbers, paths as text.
            log_path: file to which its standard output and standard error are appended.
            env: additional environment variables; secrets are inherited from this process's environment.
        """
        self.start()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        request = {"target": target, "args": list(args), "log": str(log_path.resolve()), "env": dict(env or {})}
        self._send({"start": request})
        deadline_s = time.monotonic() + _START_S
        while not self._started_pids:
            if self._socket is None or time.monotonic() > deadline_s:
                self.close()  # a late answer would be taken for the next role's
                raise ServiceUnavailableError(
                    f"cannot start {name}: the fork server does not answer:\n{processes.tail(self._log_path)}"
                )
            self._read(1.0)
        role = Role(self, self._started_pids.pop(0), name, log_path)
        role.exitcode = self._ended_early.pop(role.pid, None)
        if role.exitcode is None:
            self._roles[role.pid] = role
        return role

    def launch(self, spec: RoleSpec) -> Role:
        """Call `start_role` for a `Supervisor`."""
        return self.start_role(spec.target, spec.args, log_path=spec.log_path, name=spec.name, env=spec.env)

    def running(self) -> list[Role]:
        """Return the running roles."""
        self._read(0.0)
        return list(self._roles.values())

    def close(self) -> None:
        """Kill the running roles and the fork server. The call may be repeated."""
        if self._process is not None:
            self._process.kill()  # its children are killed with it
            self._process.wait()
        self._mark_all_lost()

    def _send(self, request: dict[str, Any]) -> None:
        if self._socket is not None:
            try:
                self._socket.sendall(json.dumps(request).encode() + b"\n")
            except OSError:
                self._mark_all_lost()

    def _read(self, timeout_s: float | None) -> None:
        """Process the messages of the fork server. Wait at most `timeout_s` for the first one."""
        if self._socket is None:
            return
        ready, _, _ = select.select([self._socket], [], [], timeout_s)
        if not ready:
            return
        try:
            data = self._socket.recv(65_536)
        except OSError:
            data = b""
        if not data:
            self._mark_all_lost()
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            match json.loads(line):
                case {"started": int() as pid}:
                    self._started_pids.append(pid)
                case {"ended": int() as pid, "code": int() as code}:
                    if pid in self._roles:
                        self._roles.pop(pid).exitcode = code
                    else:
                        self._ended_early[pid] = code

    def _mark_all_lost(self) -> None:
        """Mark all roles as ended, because the fork server has ended and its children are killed with it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for role in self._roles.values():
            role.exitcode = _LOST_EXIT_CODE
        self._roles.clear()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
