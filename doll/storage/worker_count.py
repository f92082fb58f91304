"""How many workers a running job is to have, in Redis: for processes that wait for a place.

The parameter server writes it (`doll scale` changes it), and `--any-slot` workers read it. Without it they count with
the job file's number.
"""

from __future__ import annotations

from typing import Any

import redis

from doll.storage.blobs import key_prefix


class WorkerCount:
    """The number of one job.

    Args:
        job: the job, and what else tells it from others on this Redis.
    """

    def __init__(self, client: redis.Redis, job: str) -> None:
        self._client: Any = client  # redis-py's types mix its synchronous and asynchronous answers
        self._key = f"{key_prefix(job)}:workers"

    def set(self, workers: int) -> bool:
        """The job is to have so many from now on. False: Redis does not answer."""
        try:
            self._client.set(self._key, workers)
        except redis.RedisError:
            return False
        return True

    def get(self, default: int) -> int:
        """`default` where nobody has set it, or not to a number above 0.

        Raises:
            RedisError: Redis does not answer.
        """
        value = self._client.get(self._key)
        return int(value) if value is not None and value.isdigit() and int(value) > 0 else default
