"""What `pyproject.toml` admits is what was tested, and what the lock holds can be installed on arm64."""

from __future__ import annotations

import re
import tomllib

import pytest
import redis
import redis.connection
from confluent_kafka import KafkaException, Producer
from deploy_scripts import load
from packaging.requirements import Requirement
from packaging.version import Version
from paths import ROOT

DECLARED = {
    requirement.name: requirement
    for requirement in map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
}
LOCKED = dict(re.findall(r"^([a-z0-9.-]+)==([^ ]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["aiokafka", "faust-streaming", "mode-streaming"])
def test_the_workers_shell_is_pinned_exactly(name: str) -> None:
    assert str(DECLARED[name].specifier) == f"=={LOCKED[name]}"


@pytest.mark.parametrize("codec", ["gzip", "lz4", "snappy", "zstd"])
def test_the_client_library_has_every_codec_that_a_producer_may_choose(codec: str) -> None:
    """Where one is missing, a record of that codec ends its stream's worker, again and again."""
    Producer({"compression.type": codec})
    with pytest.raises(KafkaException):
        Producer({"compression.type": "none such"})


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
    text = (ROOT / "doll/storage/redis_blobs.py").read_text()
    assert set(re.findall(r"connection\.(_\w+)", text)) == {"_sock", "_parser"}
    for path in (ROOT / "doll").rglob("*.py"):
        assert not re.search(r"(?:from|import) redis(?:\.\w+)*\._", path.read_text()), path
    connection = redis.Connection()
    assert connection._sock is None
    assert callable(connection._parser.parse_error)


def test_the_table_of_wheels_for_arm64_is_that_of_the_lock() -> None:
    """The registry is asked by deploy/wheels.py, when the lock changes; this test needs no network."""
    wheels = load("wheels")
    kept = wheels.parse_table(wheels.TABLE.read_text())
    for platform, (_, environment) in wheels.PLATFORMS.items():
        locked = set(wheels.pins(wheels.LOCK.read_text(), environment))
        assert kept[platform].keys() == locked, "requirements.lock has changed: run `make wheels`"
    assert "source" not in kept["macos"].values(), "pip would need a compiler on a Mac"
    image = re.search(r"^ARG PYTHON_IMAGE=python:(\d+\.\d+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert image is not None
    assert image[1] == wheels.PYTHON
