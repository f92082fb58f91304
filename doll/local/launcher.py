"""Run a program that dies with its parent: `python -I -S launcher.py PARENT_PID PROGRAM ARGUMENT...`.

It is a program of its own, because code between fork and exec (`preexec_fn`) may deadlock in a parent with threads. The
signal asked for here outlives exec, and the process keeps its id.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux to SIGKILL this process when the thread that started it ends, and end at once where it has ended.

    Elsewhere than on Linux it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent ended before the request: nobody would send the signal
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
