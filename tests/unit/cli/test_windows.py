"""Commands that start nothing work on Windows, as far as their imports go: without what its Python lacks.

The standard library and the dependencies are loaded before, as on this system; DOLL's own modules are loaded again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # loads torch

_LACKING = """
import importlib.abc, os, select, signal, socket, sys

MODULES = {"fcntl", "grp", "posix", "pwd", "resource", "syslog", "termios", "uvloop"}
NAMES = {
    os: ("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "WNOHANG", "chown", "eventfd", "eventfd_read",
         "eventfd_write", "fork", "forkpty", "getegid", "geteuid", "getgid", "getpgid", "getuid", "killpg", "mkfifo",
         "nice", "pidfd_open", "posix_fallocate", "posix_spawn", "pread", "preadv", "pwrite", "register_at_fork",
         "sched_getaffinity", "sched_yield", "setpgid", "setsid", "statvfs", "sysconf", "uname", "wait", "waitid",
         "writev"),
    signal: ("SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP",
             "SIGUSR1", "SIGUSR2", "pthread_sigmask", "sigwait"),
    socket: ("AF_UNIX", "MSG_NOSIGNAL", "MSG_WAITALL", "SO_PEERCRED"),
    select: ("epoll", "poll"),
}


class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def become_windows():
    gone = {"doll", "doll_lab", *MODULES}
    for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
        del sys.modules[name]
    sys.meta_path.insert(0, Refuse())
    for module, names in NAMES.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = "win32"
"""
_SCRIPT = """
import json
from pathlib import Path
from typer.testing import CliRunner

COMMANDS = [
    ["--help"], ["--version"], ["up", "--help"], ["audit", "--help"], ["provision", "--help"], ["example", "list"],
    ["example", "copy", "stdin", "FOLDER"], ["config", "check", "FOLDER"], ["config", "show", "digits"],
    ["config", "check", "digits", "--build-model"], ["plan", "digits"],
    ["simulate", "digits", "--set", "stop.updates=20"],
    ["compare", "digits", "--simulate", "--policies", "bsp,asp", "--set", "stop.samples=2000"],
    ["spot", "--help"], ["backtest", "--help"], ["drill", "--help"],
]

def run_all(folder):
    from doll.cli.app import app
    said = []
    for command in COMMANDS:
        result = CliRunner().invoke(app, [word.replace("FOLDER", folder) for word in command])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        said.append([" ".join(command), result.exit_code, result.output.replace(folder, "FOLDER")])
    return said

here = run_all("copied-here")
become_windows()
there = run_all("copied-there")
print(json.dumps([here, there]))
"""


def test_commands_that_start_nothing_say_the_same_without_what_windows_lacks(tmp_path: Path) -> None:
    import json

    completed = subprocess.run(
        [sys.executable, "-c", _LACKING + _SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    here, there = json.loads(completed.stdout.splitlines()[-1])
    assert [(command, code) for command, code, _ in there] == [(command, 0) for command, _, _ in here]
    for one, other in zip(here, there, strict=True):
        assert one == other
