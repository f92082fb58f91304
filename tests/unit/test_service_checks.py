"""What is said when Kafka or Redis does not answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from doll.errors import ServiceUnavailableError
from doll.local.redis_server import LocalRedis
from doll.service_checks import require_services
from doll.services import Services
from job_files import job


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


def test_require_gives_up_on_servers_that_stay_silent(silent_port: int) -> None:
    silent = Services(f"127.0.0.1:{silent_port}", f"redis://127.0.0.1:{silent_port}/0")
    with pytest.raises(ServiceUnavailableError):
        require_services(job(), silent, timeout_s=1.0)
