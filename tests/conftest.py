"""What all tests share: one real Kafka broker, one Redis server, names that do not meet, fixed seeds."""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fast_botocore
import numpy as np
import pytest
from doll.local import kafka_jars
from doll.local.forks import ForkServer
from doll.local.kafka_broker import LocalKafka
from doll.local.redis_server import LocalRedis
from doll.services import Services
from doll.storage.redis_client import connect_redis
from forked_commands import LOADED, Program
from fuzzing import examples
from hypothesis import settings
from paths import SUPPORT

pytest_plugins = ["costs", "worlds"]
UNDER_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")

# No deadline: the machines are slow and shared. In CI the examples are the same each time.
settings.register_profile("doll", deadline=None, derandomize=UNDER_CI, max_examples=examples(100))
settings.load_profile("doll")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has what it starts in the background ignore SIGINT, and a program that a test interrupts inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Some commands lower the priority of their process. The test process, in which they may run, keeps its own.
os.setpriority = lambda which, who, priority: None


SLOW_FOLDERS = {"integration", "e2e"}
SLOW_MARKERS = {"integration", "e2e", "fuzz"}
SERVER_FIXTURES = {"broker", "redis_server", "own_redis", "fork_server", "doll"}
SLOW_MODULE = re.compile(r"^pytestmark = .*pytest\.mark\.(slow|integration|e2e|fuzz)", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m "not slow"` does not import the modules that are slow as a whole: they load torch."""
    if config.option.markexpr != "not slow" or not collection_path.name.startswith("test_"):
        return None
    slow = SLOW_FOLDERS & set(collection_path.parts) or SLOW_MODULE.search(collection_path.read_text(encoding="utf-8"))
    return True if slow else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """A fast module that loads torch fails: the other fast tests would wait for it."""
    before = "torch" in sys.modules
    report: Any = yield
    if not before and "torch" in sys.modules and collector.config.option.markexpr == "not slow":
        report.outcome, report.longrepr = "failed", "this module loads torch: give it `pytestmark = pytest.mark.slow`"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts a server or runs a whole job is slow without a marker of its own."""
    for item in items:
        names = {marker.name for marker in item.iter_markers()}
        fixtures = set(item.fixturenames) if isinstance(item, pytest.Function) else set()
        if SLOW_FOLDERS & set(item.path.parts) or SLOW_MARKERS & names or SERVER_FIXTURES & fixtures:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _fast_tests_load_no_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    before = "torch" in sys.modules
    yield
    if not before and "torch" in sys.modules and request.node.get_closest_marker("slow") is None:
        pytest.fail("this test loads torch: mark it slow")


@pytest.fixture(autouse=True)
def _seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins with the same random state and knows no service of the user's."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    for name in [
        name for name in os.environ if name.startswith(("DOLL_CONTROL", "DOLL_KAFKA", "DOLL_REDIS", "DOLL_REGISTRY"))
    ]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def _fast_botocore() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fast_botocore.use(patch)
        yield


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of an imitated S3 with an empty bucket `models`."""
    import boto3
    from moto import mock_aws

    for name, value in (
        ("ACCESS_KEY_ID", "AKIDTEST"),
        ("SECRET_ACCESS_KEY", "hunter2-secret"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    with mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket="models")
        yield client


@pytest.fixture(scope="session")
def startable_broker() -> None:
    """Skip where no Kafka broker can be started."""
    unavailable_reason = kafka_jars.unavailable_reason()
    if unavailable_reason is not None:
        if UNDER_CI:
            pytest.fail(f"CI needs a real Kafka broker: {unavailable_reason}")
        pytest.skip(f"no Kafka broker can be started: {unavailable_reason}")


@pytest.fixture(scope="session")
def broker(startable_broker: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    """A real Kafka broker on loopback. A test that stops or kills it must start it again."""
    with LocalKafka(tmp_path_factory.mktemp("kafka")) as kafka:
        yield kafka


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRedis]:
    """A real Redis server on loopback. A test that stops or kills it must start it again."""
    with LocalRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """One process with torch loaded, from which all roles and commands of all tests are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH", "")])))
        server = ForkServer(tmp_path_factory.mktemp("forks") / "forkserver.log", LOADED)
        server.start()
    with server:
        yield server


@pytest.fixture
def doll(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """The command line as a program."""
    program = Program(fork_server, tmp_path_factory.mktemp("doll"))
    yield program
    program.close()


@pytest.fixture
def redis_client(redis_server: LocalRedis) -> Iterator[Any]:
    client: Any = connect_redis(Services("", redis_server.address))
    yield client
    client.close()


@pytest.fixture
def services(broker: LocalKafka, redis_server: LocalRedis) -> Services:
    """Addresses of the session's broker and Redis."""
    return Services(broker.address, redis_server.address)


@pytest.fixture
def nowhere() -> Iterator[Services]:
    """A port of ours on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield Services(f"127.0.0.1:{taken.getsockname()[1]}", "redis://127.0.0.1:1/0")


@pytest.fixture
def job_name(request: pytest.FixtureRequest) -> str:
    """A job name of this test's own, so that its topics and keys meet nobody's."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40]
    run = getattr(request.node, "execution_count", 1)  # what an earlier run of the same test left is not its own
    return f"t-{words}-{hashlib.sha1(f'{request.node.nodeid}#{run}'.encode()).hexdigest()[:6]}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What failed first and passed when it was run again is a race to be found: show it in full."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"run again: {report.nodeid}", red=True)
        terminalreporter.line(report.longreprtext)
