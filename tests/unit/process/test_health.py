"""Pulses with a virtual clock, probes over real HTTP, and a real process that is stuck."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from doll.errors import ConfigError
from doll.local.processes import free_port
from doll.process.health import HOST_ENV, PORT_ENV, Heartbeat, Watchdog, heartbeat_of, port_of
from job_files import job


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ask(port: int, path: str, method: str = "GET") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, json.loads(body) if body.startswith(b"{") else None


def test_it_starts_healthy_and_not_ready() -> None:
    heartbeat = Heartbeat("ps", clock=Clock())
    assert heartbeat.report() == {
        "process": "ps", "healthy": True, "ready": False, "reasons": ["starting"], "ages_s": {},
    }  # fmt: skip
    heartbeat.set_waiting_for("")
    assert heartbeat.report()["ready"]


def test_a_vital_beat_that_is_late_is_ill_another_one_only_not_ready() -> None:
    clock = Clock()
    heartbeat = Heartbeat("ps", clock=clock)
    heartbeat.set_waiting_for("")
    heartbeat.expect("loop", within_s=15)
    heartbeat.expect("kafka", within_s=5, vital=False)
    clock.now += 6
    report = heartbeat.report()
    assert (report["healthy"], report["ready"]) == (True, False)
    assert report["reasons"] == ["kafka: no beat for 6 s"]
    assert report["ages_s"] == {"loop": 6.0, "kafka": 6.0}
    heartbeat.beat("kafka")
    assert heartbeat.report()["ready"]
    clock.now += 10
    heartbeat.beat("kafka")
    heartbeat.beat("never expected")
    report = heartbeat.report()
    assert (report["healthy"], report["ready"]) == (False, False)
    assert report["reasons"] == ["loop: no progress for 16 s"]
    heartbeat.beat("loop")
    assert heartbeat.report()["ready"]


def watched(liveness_timeout_s: float) -> tuple[Clock, Heartbeat, Watchdog]:
    clock = Clock()
    heartbeat = Heartbeat("ps", clock=clock)
    heartbeat.expect("loop", within_s=15)
    heartbeat.expect("kafka", within_s=1, vital=False)
    return clock, heartbeat, Watchdog(heartbeat, liveness_timeout_s, clock=clock)


def test_the_watchdog_ends_what_is_stuck_for_long_enough() -> None:
    clock, heartbeat, watchdog = watched(60)
    for _ in range(75):
        clock.now += 1
        assert watchdog.check() == ""
    clock.now += 1
    assert watchdog.check() == "loop: no progress for 76 s"
    heartbeat.beat("loop")
    assert watchdog.check() == ""
    for _ in range(70):
        clock.now += 1
        assert watchdog.check() == ""  # counted from here


def test_kafka_s_absence_ends_nothing() -> None:
    clock, heartbeat, watchdog = watched(10)
    for _ in range(1000):
        clock.now += 1
        heartbeat.beat("loop")
        assert watchdog.check() == ""


def test_a_process_that_was_stopped_for_an_hour_is_not_stuck() -> None:
    clock, heartbeat, watchdog = watched(60)
    clock.now += 3600
    assert watchdog.check() == ""
    clock.now += 1
    heartbeat.beat("loop")
    assert watchdog.check() == ""


def test_the_port_comes_from_the_environment_else_from_the_job_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORT_ENV, raising=False)
    assert port_of(job(), "ps") is None
    config = job("health.base_port=9000")
    ports = {
        name: port_of(config, name) for name in ("ps", "evaluator", "producer", "ps-standby", "worker-0", "worker-7")
    }
    assert ports == {
        "ps": 9000, "evaluator": 9001, "producer": 9002, "ps-standby": 9003, "worker-0": 9010, "worker-7": 9017,
    }  # fmt: skip
    monkeypatch.setenv(PORT_ENV, "8123")
    assert port_of(config, "ps") == 8123
    for wrong in ("0", "70000", "x", "-1", "²"):
        monkeypatch.setenv(PORT_ENV, wrong)
        with pytest.raises(ConfigError, match="DOLL_HEALTH_PORT: expected a port"):
            port_of(config, "ps")


@pytest.mark.slow
def test_probes_answer_on_loopback_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv(PORT_ENV, str(port))
    with heartbeat_of("worker-3", job()) as heartbeat:
        assert ask(port, "/healthz")[0] == 200
        status, report = ask(port, "/readyz")
        assert (status, report["process"], report["reasons"]) == (503, "worker-3", ["starting"])
        heartbeat.set_waiting_for("")
        assert ask(port, "/readyz?verbose")[0] == 200
        assert ask(port, "/readyz", "HEAD") == (200, None)
        heartbeat.expect("loop", within_s=-1)
        assert ask(port, "/healthz")[0] == 503
        assert ask(port, "/")[0] == 404
        assert ask(port, "/healthz", "POST")[0] == 501
        with socket.create_connection(("127.0.0.1", port)) as rude:
            rude.sendall(b"\x00\xff nonsense\r\n\r\n")
        assert ask(port, "/healthz")[0] == 503
    with pytest.raises(ConnectionRefusedError):
        ask(port, "/healthz")


def test_probes_answer_elsewhere_where_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2 is an address of this machine, too."""
    port = free_port()
    monkeypatch.setenv(PORT_ENV, str(port))
    monkeypatch.setenv(HOST_ENV, "127.0.0.2")
    with heartbeat_of("ps", job()):
        with pytest.raises(ConnectionRefusedError):
            ask(port, "/healthz")
        connection = http.client.HTTPConnection("127.0.0.2", port, timeout=60)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()


def test_a_port_that_is_taken_does_not_stop_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv(PORT_ENV, str(other.getsockname()[1]))
        with heartbeat_of("ps", job()) as heartbeat:
            assert not heartbeat.report()["ready"]
    captured = capsys.readouterr()
    assert "health_probe_unavailable" in captured.out + captured.err


@pytest.mark.slow
def test_a_stuck_process_ends_with_an_error() -> None:
    program = (
        "import signal, sys\nfrom doll.config import parse\nfrom doll.process.health import heartbeat_of\n"
        "config = parse(\"job: j\\ntask: {class: 'a:B'}\\nhealth: {liveness_timeout_s: 0.5}\")\n"
        "with heartbeat_of('ps', config) as heartbeat:\n"
        "    heartbeat.expect('loop', within_s=0.2)\n"
        "    signal.pause()\n"
        "sys.exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False, env={**os.environ}
    )
    assert done.returncode == 1
    assert "loop: no progress for" in done.stdout + done.stderr
