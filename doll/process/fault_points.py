"""Define fault points: points in the code, between two side effects, at which a test can let the process be killed.

`DOLL_FAULT=ps.after_apply@3` kills the process (SIGKILL) when it reaches that point for the third time. If
`DOLL_FAULT_MARKER` names a file, only the first process that reaches the point is killed: it creates the file. Without
`DOLL_FAULT`, a point costs one lookup.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Final

from doll.errors import ConfigError

POINTS: Final = (
    "worker.after_dead_letter",
    "worker.after_announce",
    "worker.after_guard",
    "worker.mid_set",
    "worker.after_sum",
    "worker.after_blob",
    "worker.after_push",
    "worker.after_durable",
    "ps.after_claim",
    "ps.after_first_checkpoint",
    "ps.after_weights",
    "ps.after_grant",
    "ps.after_apply",
    "ps.after_update",
    "ps.mid_checkpoint",
    "ps.after_checkpoint",
    "ps.after_durable",
    "shard.after_apply",
    "shard.after_part",
    "regrid.after_next_job",
    "regrid.after_claim",
    "regrid.after_checkpoint",
    "regrid.after_copy",
    "regrid.after_job",
    "forget.after_claim",
    "forget.after_checkpoint",
    "rollback.after_claim",
    "rollback.after_checkpoint",
)
ENV: Final = "DOLL_FAULT"
MARKER_ENV: Final = "DOLL_FAULT_MARKER"

_hits: Counter[str] = Counter()


def fault_point(name: str, before_exit: Callable[[], object] | None = None) -> None:
    """Kill this process here if the environment requests it. First call `before_exit`, so that the side effect before
    this point is complete, for example flushed. Raise ConfigError if `DOLL_FAULT` is not a known `point@count`."""
    wanted = os.environ.get(ENV)
    if not wanted:
        return
    point, _, count = wanted.partition("@")
    if point not in POINTS or not count.isdecimal():
        raise ConfigError(f"{ENV}: expected point@count with a point of {', '.join(POINTS)}; got {wanted!r}")
    if point != name:
        return
    _hits[name] += 1
    if _hits[name] == int(count) and _is_first():
        if before_exit is not None:
            before_exit()
        os.kill(os.getpid(), signal.SIGKILL)


def _is_first() -> bool:
    marker = os.environ.get(MARKER_ENV)
    if marker is None:
        return True
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True
