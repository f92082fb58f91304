"""`doll health` against a real probe, and the job that the environment names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import doll
from doll.cli.options import JOB_ENV
from doll.config import parse
from doll.local.processes import free_port
from doll.process.health import PORT_ENV, heartbeat_of

JOB = "job: j\ntask: {class: 'a:B'}\n"


@pytest.mark.slow
def test_health_says_what_the_probe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT_ENV, str(free_port()))
    with heartbeat_of("ps", parse(JOB)) as heartbeat:
        healthy = doll("health")
        assert healthy.exit_code == 0
        assert json.loads(healthy.stdout)["process"] == "ps"
        assert doll("health", "--ready").exit_code == 1, "it is still starting"
        heartbeat.set_waiting_for("")
        assert doll("health", "--ready").exit_code == 0
        heartbeat.expect("loop", within_s=-1)
        unhealthy = doll("health")
        assert unhealthy.exit_code == 1
        assert "loop: no progress" in unhealthy.stderr
    nobody = doll("health")
    assert nobody.exit_code == 1
    assert "no answer from 127.0.0.1" in nobody.stderr


@pytest.mark.parametrize("port", ["", "http", "0", "65536"])
def test_a_port_that_is_none_is_wrong_usage(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT_ENV, port)
    assert doll("health").exit_code == 2


def test_the_environment_names_the_job_where_the_command_line_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(JOB.replace("job: j", f"job: {name}"))
    monkeypatch.delenv(JOB_ENV, raising=False)
    assert doll("config", "show").exit_code == 2
    monkeypatch.setenv(JOB_ENV, str(tmp_path / "one.yaml"))
    assert "job: one" in doll("config", "show").output
    assert "job: two" in doll("config", "show", str(tmp_path / "two.yaml")).output


def test_a_job_that_others_feed_needs_no_producer_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(JOB)
    ended = doll("produce", "--job", str(tmp_path / "my.yaml"), "--until-finished")
    assert ended.exit_code == 0
    assert "has no source" in ended.stderr
    assert doll("produce", "--job", str(tmp_path / "my.yaml")).exit_code == 2


def test_a_slot_that_is_named_comes_before_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.yaml").write_text(JOB)
    monkeypatch.setenv("DOLL_WORKER", "7")
    refused = doll("worker", "--job", str(tmp_path / "my.yaml"), "--any-slot")
    assert refused.exit_code == 2
    assert "expected 0 .. 3" in refused.stderr
