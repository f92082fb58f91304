"""Run a program that is killed when its parent ends: `python -I -S launcher.py [--watch] PARENT_PID PROGRAM ARG...`.

This is a separate program, because code between fork and exec (`preexec_fn`) may deadlock in a parent with threads. The
launcher requests a death signal and then executes the program: exec changes neither this signal nor the process id.

`--watch` is for systems without death signals, such as macOS: a child of the program checks twice a second whether the
parent exists, and kills the program if it does not.
"""

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
WATCH = "--watch"
_LOOK_S = 0.5
_MAX_DESCRIPTORS = 4096


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux to SIGKILL this process when the thread that started it ends. Exit if the thread has already ended.

    On other systems than Linux, this function does nothing; `watch` can be used instead.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent ended before the request, so no signal would be sent
        os._exit(1)


def watch(parent_pid: int) -> None:
    """Start a child that kills this process after the parent has ended. Exit if the parent has already ended."""
    watched_pid = os.getpid()
    if os.fork():
        if os.getppid() != parent_pid:
            os._exit(1)
        return
    os.closerange(0, _MAX_DESCRIPTORS)  # readers of the program's output wait until no process has the other end
    while os.getppid() == watched_pid:
        try:
            os.kill(parent_pid, 0)
        except ProcessLookupError:
            os.kill(watched_pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
    os._exit(0)


def _main(arguments: list[str]) -> None:
    is_watched = arguments[0] == WATCH
    parent_pid, *program = arguments[is_watched:]
    (watch if is_watched else die_with_parent)(int(parent_pid))
    os.execvp(program[0], program)


if __name__ == "__main__":
    _main(sys.argv[1:])
