"""Fixtures: a Redis server that a test may kill, the events that a test logs, both ends of a control link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import structlog
from checkpoint_kits import kit as kit
from control_rig import KINDS, Rig
from doll.local.redis_server import LocalRedis
from doll.services import Services
from waiting import WAIT_TIMEOUT_S


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


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    tmp_path.chmod(0o700)
    redis_url = request.getfixturevalue("redis_server").address if request.param == "redis" else ""
    with closing(Rig(request.param, Services("", redis_url), tmp_path / "s")) as made:
        yield made


@pytest.fixture
def _no_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a link fails, the pause before the next attempt outlasts the test."""
    monkeypatch.setattr("doll.consumers.channels.control_link._RETRY_S", 10 * WAIT_TIMEOUT_S)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path
