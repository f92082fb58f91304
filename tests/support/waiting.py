"""The one way in which tests wait for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# Bounds failure only: a loaded machine is ten times as slow as a quiet one.
WAIT_TIMEOUT_S = 300.0
_PAUSE_S = 0.02


def until(condition: Callable[[], Any], what: str | Callable[[], str], timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Return when `condition` holds; fail with `what` was waited for, or with what it then says, after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(_PAUSE_S)
