"""Services from docker compose. No container engine runs here: a script named docker notes what is asked of it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from doll.config import parse
from doll.errors import ServiceUnavailableError
from doll.local import compose
from doll.local.compose import Compose
from doll.local.mock_kafka import MockKafka
from doll.local.redis_server import LocalRedis
from doll.local.stack import local_stack

pytestmark = pytest.mark.slow  # starts servers


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a compose file, and a PATH that holds nothing but what the test installs."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "docker-compose.yml").touch()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return tmp_path


def install_docker(checkout: Path, answers: str) -> None:
    """`answers`: shell `case` arms on all arguments."""
    docker = checkout / "bin" / "docker"
    docker.write_text(f'#!/bin/sh\necho "$*" >> {checkout}/asked\ncase "$*" in\n{answers}\nesac\n')
    docker.chmod(docker.stat().st_mode | stat.S_IXUSR)


def asked(checkout: Path) -> list[str]:
    """What docker was asked to do, without the file."""
    lines = (checkout / "asked").read_text().splitlines()
    return [line.replace(f"compose --file {checkout}/docker-compose.yml ", "") for line in lines]


def test_the_compose_file_is_found_above_the_job_within_the_checkout(checkout: Path) -> None:
    install_docker(checkout, "*) exit 0;;")
    assert compose.find(checkout / "jobs") == checkout / "docker-compose.yml"


def test_a_compose_file_outside_the_checkout_is_not_ours(checkout: Path) -> None:
    install_docker(checkout, "*) exit 0;;")
    (checkout / "jobs" / "pyproject.toml").touch()
    assert compose.find(checkout / "jobs") == "no docker-compose.yml beside the job file"


def test_without_docker_or_its_engine_the_reason_is_told(checkout: Path) -> None:
    assert compose.find(checkout) == "no docker on PATH"
    install_docker(checkout, "info) exit 1;;")
    assert compose.find(checkout) == "the docker engine does not answer"
    install_docker(checkout, "info) exit 0;;\n'compose version') exit 1;;")
    assert compose.find(checkout) == "docker has no compose plugin (v2)"


def test_a_service_is_waited_for_and_its_published_port_is_its_address(checkout: Path) -> None:
    install_docker(checkout, "*port*) echo 0.0.0.0:49153;;")
    service = Compose(checkout / "docker-compose.yml", "kafka")
    assert not service.is_running()
    assert service.up() == "127.0.0.1:49153"
    service.down()
    assert asked(checkout) == [
        "ps --quiet --status running kafka",
        "up --detach --wait kafka",
        "port kafka 9092",
        "rm --stop --force kafka",
    ]


def test_what_docker_says_when_it_fails_is_shown(checkout: Path) -> None:
    install_docker(checkout, "*up*) echo 'no such image' >&2; exit 18;;")
    with pytest.raises(ServiceUnavailableError, match=r"(?s)compose .* up .* failed:\nno such image"):
        Compose(checkout / "docker-compose.yml", "kafka").up()


@pytest.mark.parametrize("running_before", [False, True])
def test_the_stack_removes_the_container_that_it_started_and_no_other(
    checkout: Path, redis_server: LocalRedis, running_before: bool
) -> None:
    config = parse(
        f"job: j\ntask: {{class: 'a:B'}}\nredis: {{address: '{redis_server.address}'}}\n", base_folder=checkout / "jobs"
    )
    with MockKafka(checkout, {}) as container:
        running = "abc" if running_before else ""
        install_docker(checkout, f"*port*) echo {container.address};;\n*ps*) echo {running};;")
        with local_stack(config, checkout / "run", print) as stack:
            assert (stack.kafka_kind, stack.services.kafka) == ("compose", container.address)
            assert "no Java" in stack.notes[-1]
            assert "rm --stop --force kafka" not in asked(checkout)
    assert "up --detach --wait kafka" in asked(checkout)
    assert ("rm --stop --force kafka" in asked(checkout)) == (not running_before)
