"""Roles that the tests of the fork server start by name."""

from __future__ import annotations

import os
import signal
import sys
import time
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
        time.sleep(60)
    return 7


def speak(out: str, err: str) -> None:
    sys.stdout.write(out)
    sys.stderr.write(err)


def fail() -> None:
    raise RuntimeError("this role has failed")
