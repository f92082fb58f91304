"""What is said when Kafka or Redis does not answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from doll.cli.app import app
from doll.config import JobConfig, load
from doll.errors import ServiceUnavailableError
from doll.kafka import topics
from doll.local.redis_server import LocalRedis
from doll.run.folder import RunFolder
from doll.service_checks import require_services
from doll.services import Services
from job_files import job
from typer.testing import CliRunner

pytestmark = pytest.mark.slow  # starts servers


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield listener.getsockname()[1]


@pytest.mark.integration
def test_require_returns_when_both_answer(services: Services) -> None:
    require_services(job(), services)


def test_require_names_each_service_that_is_not_there_and_what_to_do(redis_server: LocalRedis) -> None:
    gone = Services("127.0.0.1:1", "redis://127.0.0.1:1/0")
    with pytest.raises(ServiceUnavailableError) as caught:
        require_services(job(), gone, timeout_s=0.5)
    for word in (
        "redis://127.0.0.1:1/0",
        "redis.address",
        "Kafka at 127.0.0.1:1 ",
        "refused",
        "DOLL_KAFKA",
        "`doll up`",
    ):
        assert word in str(caught.value)
    with pytest.raises(ServiceUnavailableError) as caught:
        require_services(job(), Services("127.0.0.1:1", redis_server.address), timeout_s=0.5)
    assert "Redis" not in str(caught.value)


def test_require_names_the_redis_of_a_shard_that_is_not_there(redis_server: LocalRedis) -> None:
    config = job("ps.shards=2", f"redis.shard_addresses=['redis://127.0.0.1:1/0', '{redis_server.address}']")
    with pytest.raises(ServiceUnavailableError) as caught:
        require_services(config, Services("127.0.0.1:1", redis_server.address), timeout_s=0.5)
    assert "start it, or correct redis.shard_addresses; Kafka" in str(caught.value)


def test_require_gives_up_on_servers_that_stay_silent(silent_port: int) -> None:
    silent = Services(f"127.0.0.1:{silent_port}", f"redis://127.0.0.1:{silent_port}/0")
    with pytest.raises(ServiceUnavailableError):
        require_services(job(), silent, timeout_s=1.0)


@pytest.mark.integration
def test_what_reads_topics_alone_needs_no_redis(services: Services, job_name: str, tmp_path: Path) -> None:
    """A run whose Redis has gone: its dead letters, audit, topics and status are in Kafka and in its checkpoints."""
    run = tmp_path / "run"
    run.mkdir()
    config = load_text(tmp_path, job_name)
    topics.ensure(config, services)
    folder = RunFolder(run)
    folder.write_job(config)
    folder.write_stack(Services(services.kafka, "redis://127.0.0.1:1/0"))
    for command in (["dead", "list"], ["dead", "show"], ["dead", "replay"], ["audit"], ["topics"], ["status"]):
        result = CliRunner().invoke(app, [*command, str(run)])
        assert (result.exit_code, result.stderr) == (0, ""), command
    job_file = run / "job.yaml"
    without_redis = CliRunner(env={"DOLL_KAFKA": services.kafka, "DOLL_REDIS": ""})
    (run / "stack.json").unlink()
    assert without_redis.invoke(app, ["topics", str(job_file)]).exit_code == 0
    refused = without_redis.invoke(app, ["ps", str(job_file)])
    assert refused.exit_code == 2
    assert "no address for Redis" in refused.stderr


def load_text(folder: Path, name: str) -> JobConfig:
    path = folder / "job.yaml"
    path.write_text(f"job: {name}\ntask: {{class: 'examples.synthetic.task:Gaussian'}}\ndata: {{workers: 2}}\n")
    return load(path)


def test_doll_up_is_not_told_to_use_doll_up() -> None:
    gone = Services("127.0.0.1:1", "redis://127.0.0.1:1/0")
    with pytest.raises(ServiceUnavailableError) as caught:
        require_services(job(), gone, timeout_s=0.5, hint="")
    assert "doll up" not in str(caught.value)
