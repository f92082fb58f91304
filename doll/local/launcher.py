"""Run a program that is killed when its parent ends: `python -I -S launcher.py PARENT_PID PROGRAM ARGUMENT...`.

It is a separate program, because code between fork and exec (`preexec_fn`) may deadlock in a parent with threads. The
death signal that it requests is kept across exec, and so is the process id.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux to SIGKILL this process when the thread that started it ends; exit if it has ended already.

    On other systems than Linux it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent ended before the request, so no signal would be sent
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
