"""A Redis server that one test may kill and start again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from doll.local.redis_server import LocalRedis


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[LocalRedis]:
    with LocalRedis(tmp_path, max_memory_mb=8) as server:
        yield server
