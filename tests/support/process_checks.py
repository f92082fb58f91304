"""What a test asks of processes that are not its children."""

from __future__ import annotations

import psutil


def is_gone(process: psutil.Process | int) -> bool:
    """Ended, or waiting only to be reaped by whoever inherited it."""
    try:
        handle = psutil.Process(process) if isinstance(process, int) else process
        return not handle.is_running() or handle.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
