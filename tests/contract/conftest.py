"""A Redis server that one test may kill and start again, and the events that a test logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from doll.local.redis_server import LocalRedis


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[LocalRedis]:
    with LocalRedis(tmp_path, max_memory_mb=8) as server:
        yield server


@pytest.fixture
def events() -> Iterator[list[str]]:
    """Names of the events logged during the test."""
    with structlog.testing.capture_logs() as captured:
        names: list[Any] = captured
        yield names
