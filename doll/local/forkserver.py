"""Run the process from which roles are forked. It imports torch once, so a role needs 0.05 s of CPU time to start, not
5 s.

`python -m doll.local.forkserver FD MODULE...` exchanges JSON lines over the socket FD: requests `{"start": {...}}` and
`{"kill": pid, "signal": n}`; answers `{"started": pid}`, `{"ended": pid, "code": c}`. The process exits when its parent
exits or closes the socket, and its children end with it.

On macOS, a process that has loaded torch cannot be forked. The process then loads nothing, and starts a new interpreter
for each role: `python -m doll.local.forkserver --role TARGET ARGUMENTS`, with the arguments in JSON.

multiprocessing's forkserver is not used: its children import the caller's main module again, and it uses pickle.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from doll.local.processes import die_with_parent, spawn
from doll.process.platform import CAN_FORK, print_any_text

_ROLE: Final = "--role"


def main(argv: list[str]) -> int:
    """Preload the modules, then serve until the socket is closed; or run one role."""
    print_any_text()  # also what a task prints
    if argv[0] == _ROLE:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _run_role(argv[1], json.loads(argv[2]))
    server_socket = socket.socket(fileno=int(argv[0]))
    for name in argv[1:]:
        try:
            importlib.import_module(name)
        except Exception:
            # A role that needs the module raises the same error, where it is reported; other roles can still run.
            sys.stderr.write(f"forkserver: cannot preload {name}\n")
            traceback.print_exc()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()  # the children's garbage collector then does not touch these pages, so they stay shared
    return _Server(server_socket).run()


class _Server:
    def __init__(self, server_socket: socket.socket) -> None:
        self._socket = server_socket
        self._children: dict[int, Callable[[], int | None]] = {}  # functions that return exit codes, by process id
        self._unread = b""
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)

    def run(self) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # the wake-up descriptor works only with a handler
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wake_read:
                        with contextlib.suppress(BlockingIOError):
                            self._wake_read.recv(4096)
                        self._reap()
                    elif not self._serve(selector):
                        return 0

    def _serve(self, selector: selectors.BaseSelector) -> bool:
        data = self._socket.recv(65_536)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "start" in request:
                self._start(request["start"], selector)
            elif request["kill"] in self._children:  # not reaped yet, so the id is still this child's
                os.kill(request["kill"], request["signal"])
        return bool(data)

    def _start(self, request: dict[str, Any], selector: selectors.BaseSelector) -> None:
        if CAN_FORK:
            server_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                try:
                    self._become_child(request["log"], request["env"], server_pid, selector)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                _run_role(request["target"], request["args"])
            self._children[pid] = partial(_exit_code, pid)
        else:
            command = [sys.executable, "-m", "doll.local.forkserver", _ROLE, request["target"]]
            process = spawn([*command, json.dumps(request["args"])], Path(request["log"]), request["env"])
            pid = process.pid
            self._children[pid] = process.poll
        self._send({"started": pid})

    def _become_child(self, log: str, env: dict[str, str], server_pid: int, selector: selectors.BaseSelector) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and stops this process by SIGTERM
        die_with_parent(server_pid)
        os.setsid()
        selector.close()
        for end in (self._socket, self._wake_read, self._wake_write):
            end.close()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        os.environ.update(env)

    def _reap(self) -> None:
        for pid, exit_code in list(self._children.items()):  # not every child: libraries may start helper processes
            if (code := exit_code()) is not None:
                del self._children[pid]
                self._send({"ended": pid, "code": code})

    def _send(self, answer: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent has exited: the next read returns
            self._socket.sendall(json.dumps(answer).encode() + b"\n")


def _exit_code(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _run_role(target: str, args: list[Any]) -> NoReturn:
    """Call `module:function` with `args`. Exit with the returned integer (0 without one), or 1 after a traceback."""
    code = 1
    try:
        module, _, function = target.partition(":")
        result = getattr(importlib.import_module(module), function)(*args)
        code = result if isinstance(result, int) else 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if code and isinstance(exc.code, str):
            sys.stderr.write(f"{exc.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: that would run the server's frames and exit handlers in the child.
        os._exit(code & 0xFF)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
