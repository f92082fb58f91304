"""Hosts of their own for server, worker, Kafka and Redis: a job heals from a cut, and doctor says what is cut."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.hosts.faults import make_plan
from benchmarks.hosts.network import Network, why_not
from benchmarks.hosts.router import Link
from doll.local import kafka_jars
from doll.local.kafka_broker import LocalKafka
from doll.local.redis_server import LocalRedis

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"no hosts: {why_not()}"),
    pytest.mark.skipif(kafka_jars.unavailable_reason() is not None, reason=str(kafka_jars.unavailable_reason())),
]

SEED = 3


def test_a_job_on_five_hosts_heals_from_a_cut(tmp_path: Path) -> None:
    (fault,) = make_plan(1, SEED, ("server", "worker-0"))
    assert fault.services
    assert fault.hold_s > 2
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.hosts", "--policies", "doll", "--workers", "1", "--batch-s", "0.02"),
            *("--links", "20 ms, 0.1 %", "--faults", "1", "--seed", str(SEED), "--json", str(figures)),
            *("--keep", str(tmp_path / "run")),
        ],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(figures.read_text())
    assert result["audit"]["ok"]
    assert ", 0 missing, 0 twice, 0 dead-lettered" in result["audit"]["summary"]
    assert int(result["audit"]["summary"].split(" offsets produced, ")[1].split(" ")[0]) > 0
    (line,) = result["faults"]
    assert line["recovery_s"] < 60


def _start_services(network: Network, folder: Path, done: threading.Event) -> Iterator[tuple[str, str]]:
    """Addresses of Kafka and Redis; both end when `done` is set."""
    network.enter("operator")
    with (
        LocalRedis(folder / "redis", host=network.host("redis")) as redis,
        LocalKafka(folder / "kafka", host=network.host("kafka")) as kafka,
    ):
        yield kafka.address, redis.address
        assert done.wait(300)


def _doctor(network: Network, host: str, job: Path) -> dict[str, tuple[str, str, str]]:
    """What `doll doctor` says on a host: result, detail and what to do, by check."""
    command = [
        *network.host(host).prefix,
        sys.executable,
        "-m",
        "doll",
        "doctor",
        str(job),
        "--role",
        "worker",
        "--json",
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    checks = json.loads(said.stdout)["checks"]
    return {check["name"]: (check["result"], check["detail"], check["todo"]) for check in checks}


def test_doctor_says_what_a_host_cannot_reach(tmp_path: Path) -> None:
    started: queue.Queue[tuple[str, str]] = queue.Queue()
    done = threading.Event()
    with Network(("operator", "kafka", "redis", "worker-0"), tmp_path / "router.log") as network:
        # A thread that is on the operator's host, as long as the services last: this one stays where it is.
        thread = threading.Thread(
            target=lambda: [started.put(addresses) for addresses in _start_services(network, tmp_path, done)]
        )
        thread.start()
        try:
            kafka, redis = started.get(timeout=120)
            job = tmp_path / "job.yaml"
            job.write_text(
                "job: doctor\n"
                "task: {class: 'examples.synthetic.task:Gaussian', args: {features: 4, hidden: [8]}}\n"
                "source: {kind: python, of: examples.synthetic.source:gaussians, args: {features: 4, classes: 2}}\n"
                f"kafka: {{address: '{kafka}'}}\nredis: {{address: '{redis}'}}\n"
            )
            place = redis.removeprefix("redis://").removesuffix("/0")
            network.set_link(Link(delay_s=0.02))
            whole = _doctor(network, "worker-0", job)
            assert (whole[f"Kafka: connect to {kafka}"][0], whole[f"Redis: connect to {place}"][0]) == ("ok", "ok")
            network.cut([("redis", "worker-0")])
            silent = _doctor(network, "worker-0", job)
            assert silent[f"Kafka: connect to {kafka}"][0] == "ok"
            result, detail, todo = silent[f"Redis: connect to {place}"]
            assert (result, detail) == ("failed", "nothing comes back within 5 s")
            assert todo.startswith("open the network to it")
            network.cut([("worker-0", "kafka")])
            silent = _doctor(network, "worker-0", job)
            assert silent[f"Kafka: connect to {kafka}"][:2] == ("failed", "nothing comes back within 5 s")
            assert silent[f"Redis: connect to {place}"][0] == "ok"
        finally:
            network.cut(())
            done.set()
            thread.join(60)
