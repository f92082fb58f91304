"""What a test asks of processes that are not its children."""

from __future__ import annotations

import psutil


def is_gone(process: psutil.Process | int) -> bool:
    """Ended, or waiting only to be reaped by whoever inherited it."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return not found.is_running() or found.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
