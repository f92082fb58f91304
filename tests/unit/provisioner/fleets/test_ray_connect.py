"""What `fleet.kind: ray` says where there is no cluster to use."""

from __future__ import annotations

import os

import pytest
from doll.config import JobConfig
from doll.config.loader import parse
from doll.errors import ConfigError, ServiceUnavailableError
from doll.local.processes import free_port
from doll.provisioner.fleets.ray.fleet import HEAD_AWAY_ENV, _other_version, connect


def job(fleet: str) -> JobConfig:
    return parse(f"job: digits\ntask: {{class: 'a:B'}}\ndata: {{workers: 2}}\nfleet: {fleet}\n")


def test_an_address_at_which_nobody_listens_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HEAD_AWAY_ENV, raising=False)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(  # its head may be back soon, so who restarts a provisioner goes on trying
        ServiceUnavailableError, match=rf"fleet\.address: expected the head of a Ray cluster at {address}: .*refused"
    ):
        connect(job(f"{{kind: ray, address: '{address}'}}"))
    waits_s = float(os.environ[HEAD_AWAY_ENV])
    assert waits_s >= 3600, "else Ray ends a provisioner a minute after the head is gone"


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:99999999", ""])
def test_an_address_that_is_none_is_refused_with_the_job_file(address: str) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.address: .*"):
        job(f"{{kind: ray, address: '{address}'}}")


def test_both_markets_on_the_same_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="spot, on_demand: expected different labels"):
        job("{kind: ray, spot: {a: b}, on_demand: {a: b}}")


def test_another_fleet_has_no_actors() -> None:
    with pytest.raises(ConfigError, match=r"fleet\.kind: expected ray, got processes"):
        connect(job("{kind: processes}"))


def test_a_cluster_of_another_python_says_both_versions() -> None:
    text = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.12.3\n"
        "This process on 10.0.0.1 was started with:\n    Ray: 2.60.0\n    Python: 3.11.9\n"
    )
    said = _other_version(text)
    assert said is not None
    assert "the cluster has Python 3.12.3 and Ray 2.60.0, this machine Python 3.11.9 and Ray 2.60.0" in said
    assert _other_version("GCS has died") is None
