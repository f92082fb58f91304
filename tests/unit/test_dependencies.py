"""What `pyproject.toml` admits is what was tested: packages of which we use private names are pinned to the lock."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import redis
import redis.connection
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
DECLARED = {
    one.name: one
    for one in map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
}
LOCKED = dict(re.findall(r"^([a-z0-9.-]+)==([^ ]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["aiokafka", "faust-streaming", "mode-streaming"])
def test_the_workers_shell_is_pinned_exactly(name: str) -> None:
    assert str(DECLARED[name].specifier) == f"=={LOCKED[name]}"


def test_redis_is_pinned_to_the_minor_version_that_was_tested() -> None:
    locked = Version(LOCKED["redis"])
    assert locked in DECLARED["redis"].specifier
    for other in (
        f"{locked.major}.{locked.minor + 1}.0",
        f"{locked.major}.{locked.minor - 1}.0",
        f"{locked.major + 1}.0",
    ):
        assert Version(other) not in DECLARED["redis"].specifier, other


def test_the_private_names_of_redis_that_are_used_are_known_and_there() -> None:
    text = (ROOT / "doll/ps/redis_blobs.py").read_text()
    assert set(re.findall(r"connection\.(_\w+)", text)) == {"_sock", "_parser"}
    for path in (ROOT / "doll").rglob("*.py"):
        assert not re.search(r"(?:from|import) redis(?:\.\w+)*\._", path.read_text()), path
    connection = redis.Connection()
    assert connection._sock is None
    assert callable(connection._parser.parse_error)
