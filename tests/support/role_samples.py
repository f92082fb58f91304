"""Roles that the tests of the fork server start by name."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path


def report(path: str, wait: bool = False) -> int:
    """Write down what this process sees: its state as a role; then wait for a signal if told so."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    facts = [
        os.getpid(),
        os.getppid(),
        os.getsid(0),
        ignored,
        default,
        os.environ.get("SAMPLE", ""),
        "torch" in sys.modules,
    ]
    target = Path(path)
    target.with_suffix(".part").write_text(" ".join(map(str, facts)))
    target.with_suffix(".part").rename(target)
    while wait:
        signal.pause()
    return 7


def speak(out: str, err: str) -> None:
    sys.stdout.write(out)
    sys.stderr.write(err)


def fail() -> None:
    raise RuntimeError("this role has failed")


def be_a_worker(path: str, obeys: bool) -> int:
    """Write the worker's identity to a file; then exit with 0 on SIGTERM, or ignore it if not `obeys`."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, (lambda *_: stopping.set()) if obeys else signal.SIG_IGN)
    names = ("DOLL_WORKER", "DOLL_INCARNATION", "DOLL_INSTANCE", "DOLL_MARKET", "DOLL_BOOT_DELAY_S")
    target = Path(path) / os.environ["DOLL_INSTANCE"]
    target.with_suffix(".part").write_text(" ".join(os.environ[name] for name in names))
    target.with_suffix(".part").rename(target)
    while not stopping.wait(60):
        pass
    return 0
