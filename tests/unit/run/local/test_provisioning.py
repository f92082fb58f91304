"""What `doll up` asks of a job whose workers are actors of Ray, and what its provisioner is given."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from doll.config import JobConfig, RayFleetConfig
from doll.config.loader import dump, parse
from doll.errors import ConfigError
from doll.ledger.admission import AFTER_TERM_ENV
from doll.local import ray_head
from doll.run.local import provisioning
from doll.run.local.provisioning import ActorCluster, check_actors, job_on
from doll.services import KAFKA_ENV, REDIS_ENV, Services

SERVICES = Services("127.0.0.1:9092", "redis://127.0.0.1:6379/0")
ELSEWHERE = "192.0.2.77:6379"  # no machine has this address


@pytest.fixture(autouse=True)
def _no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (KAFKA_ENV, REDIS_ENV, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def job(fleet: str = "{kind: ray}", more: str = "") -> JobConfig:
    return parse(
        f"job: digits\ntask: {{class: 'a:B'}}\ndata: {{workers: 2}}\nstop: {{updates: 100}}\n"
        f"arrivals: {{process: poisson, rate_per_s: 10}}\nfleet: {fleet}\n{more}"
    )


def test_without_ray_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"fleet\.kind: ray needs the extra ray: pip .*\[ray\]'.*--fleet processes"):
        check_actors(job())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (job(more="blobs: {kind: shm}\n"), r"blobs\.kind: expected redis or auto"),
        (job(more="plan: {machines_per_worker: 2}\n"), r"plan\.machines_per_worker: expected 1"),
        (
            job(f"{{kind: ray, address: '{ELSEWHERE}'}}"),
            r"kafka\.address, redis\.address: expected with fleet\.address",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    changed: JobConfig, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provisioning, "is_installed", lambda extra: True)
    check_actors(job())
    check_actors(job("{kind: ray, address: '127.0.0.1:6379'}"))
    with pytest.raises(ConfigError, match=words):
        check_actors(changed)


def test_a_job_without_work_or_rates_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provisioning, "is_installed", lambda extra: True)
    with pytest.raises(ConfigError, match="J, the number of updates"):
        check_actors(job().model_copy(update={"stop": type(job().stop)()}))


def test_on_a_cluster_of_its_own_both_markets_are_its_node(tmp_path: Path) -> None:
    config = job_on(parse(dump(job())), ActorCluster("127.0.0.1:1234", True, after_term=3), SERVICES, tmp_path)
    fleet = config.fleet
    assert isinstance(fleet, RayFleetConfig)
    assert fleet.address == "127.0.0.1:1234"
    assert fleet.spot != fleet.on_demand
    assert fleet.command[-2:] == ["--run-folder", str(tmp_path)]
    assert fleet.env == {KAFKA_ENV: SERVICES.kafka, REDIS_ENV: SERVICES.redis, AFTER_TERM_ENV: "3"}
    assert config.plan.on_demand_usd_per_h, "of the table, where the job states none"


def test_on_a_cluster_that_was_given_markets_and_prices_are_the_jobs(tmp_path: Path) -> None:
    given = job("{kind: ray, spot: {a: b}, env: {X: y}}")
    config = job_on(given, ActorCluster("head:1234", False), SERVICES, tmp_path)
    assert isinstance(config.fleet, RayFleetConfig)
    assert isinstance(given.fleet, RayFleetConfig)
    assert (config.fleet.spot, config.fleet.on_demand) == ({"a": "b"}, given.fleet.on_demand)
    assert config.fleet.env["X"] == "y"
    assert config.fleet.command == given.fleet.command
    assert config.plan == given.plan


def test_the_cluster_of_this_machine_is_the_one_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_head.running_address() is None
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert ray_head.running_address() == address
    assert ray_head.running_address() is None, "the file outlives its cluster"
    monkeypatch.setenv("RAY_ADDRESS", ELSEWHERE)
    assert ray_head.running_address() == ELSEWHERE
