"""The hand-over of a slot between two function invocations: the successor loads everything, then waits for its turn.

The predecessor learns from the successor's record that it is warm, and drains. Its batches, residuals and clocks are
then with the parameter server, as after a spot notice. Only then does the successor join the job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

import redis

from doll.config import JobConfig
from doll.services import Services
from doll.storage.invocations import Invocations
from doll.storage.redis_client import connect_redis
from doll.telemetry import get_logger

log = get_logger(__name__)

INVOCATION_ENV: Final = "DOLL_INVOCATION"
"""Name of the function invocation in which this worker runs."""
_POLL_S: Final = 0.05


def wait_for_place(
    config: JobConfig, services: Services, worker: int, incarnation: int, *, gives_up: Callable[[], bool]
) -> None:
    """In a function invocation, report that this worker is warm, and wait until no older invocation holds the slot.

    The wait ends also if the older one is silent, or if this process must leave. Does nothing in other processes.
    """
    name = os.environ.get(INVOCATION_ENV, "")
    if not name:
        return
    with connect_redis(services) as client:
        invocations = Invocations(client, config.job, config.cluster)
        warm = False
        while not gives_up():
            try:
                if not warm:
                    invocations.mark(name, warm_s=time.time())
                    warm = True
                    log.info("warm", worker=worker)
                if invocations.predecessor(worker, incarnation, time.time()) is None:
                    return
            except redis.RedisError as error:
                log.warning("redis_unavailable", reason=str(error), action="waiting")
            time.sleep(_POLL_S)
