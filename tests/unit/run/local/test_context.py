"""Where the roles of a local run answer health probes."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path

import pytest
from doll.ledger.admission import AFTER_TERM_ENV, ENDED_TERM_ENV
from doll.local.processes import free_port
from doll.process.health import PORT_ENV
from doll.run.local.context import taken_health_ports
from job_files import job
from local_runs import local_run


def test_the_base_port_of_the_job_file_holds_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PORT_ENV, "29555")
    run = local_run(job("health.base_port=29100"), tmp_path)
    (server,), worker = run.parameter_servers(), run.worker(1)
    assert (server.env[PORT_ENV], worker.env[PORT_ENV]) == ("29100", "29111")
    assert json.loads((tmp_path / "health.json").read_text()) == {"ps": 29100, "worker-1": 29111}


def test_the_roles_of_a_resumed_run_know_which_terms_have_ended(tmp_path: Path) -> None:
    run = dataclasses.replace(local_run(job(), tmp_path), ended_term=3)
    for role in (run.worker(0), run.evaluator()):
        assert (role.env[AFTER_TERM_ENV], role.env[ENDED_TERM_ENV]) == ("0", "3")


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as other:
        port = free_port()  # below the ports of connections, as the job file asks
        other.bind(("127.0.0.1", port))
        other.listen()
        said = taken_health_ports(job(f"health.base_port={port}"))
    assert said is not None
    assert f"{port} (ps)" in said
    assert taken_health_ports(job()) is None
