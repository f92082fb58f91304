"""The Dockerfile and docker-compose.yml, without an engine: each container's command is run as compose would run it.

Same arguments, same environment and nothing else of ours, started in the order of `depends_on`, with the health checks
really asked and the restart policies kept. A real broker and a real Redis stand in for the two images that are not
ours, so their names, and the ports and folders inside of containers, are replaced by what is true here. What only an
engine can show (that the images build and start) is not shown.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from compose_files import ALERTS, DASHBOARD, IN_FOREIGN_IMAGES, METRIC, image, project
from doll.config import load
from doll.ledger.audit import audit
from doll.local.kafka_broker import LocalKafka
from doll.local.processes import describe_exit, free_port, spawn, tail
from doll.local.redis_server import LocalRedis
from doll.services import Services
from doll.storage.file_checkpoints import FileCheckpointStore
from doll.storage.redis_client import connect_redis
from waiting import until

BIN = Path(sys.executable).parent
START_S = 600.0  # bounds failure: a loaded machine loads torch slowly

JOB = """
job: {name}
task: {{class: "examples.digits.task:Digits", args: {{hidden: [16]}}}}
data: {{workers: 2, batch_size: 8}}
source: {{kind: python, of: examples.digits.task:samples}}
arrivals: {{rate_per_s: 40}}
training: {{policy: {{name: doll, group_size: 2}}, optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}}}
checkpoint: {{every_updates: 5, every_s: 0.5}}
worker: {{lease_s: 10}}
"""

PLAN = """
stop: {updates: 40}
plan: {deadline_s: 600, spot_usd_per_h: 0.1, on_demand_usd_per_h: 0.3, alpha: 0.9, boot_s: 5}
fleet: {kind: processes, notice_s: 2}
"""


@dataclass
class Container:
    """One container of a service: a process that is restarted as the service's policy says."""

    name: str
    service: dict[str, Any]
    argv: list[str]
    environment: dict[str, str]
    folder: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    stopped: bool = False
    exit_codes: list[int] = field(default_factory=list)

    def start(self) -> None:
        assignments = [f"{key}={value}" for key, value in self.environment.items()]
        # `env -i`: what is not in the image or the compose file is not there.
        self.process = spawn(["env", "-i", "-C", str(self.folder), *assignments, *self.argv], self.log)

    def look(self) -> None:
        """Restart it if it has ended and its policy says so."""
        if self.process is None or (code := self.process.poll()) is None:
            return
        self.process = None
        self.exit_codes.append(code)
        if self.service["restart"] == "on-failure" and code != 0 and not self.stopped:
            self.restarts += 1
            self.start()

    @property
    def running(self) -> bool:
        return self.process is not None

    def healthy(self) -> bool:
        """What its own health check says."""
        kind, *argv = self.service["healthcheck"]["test"]
        assert kind == "CMD"
        asked = subprocess.run(
            [str(BIN / argv[0]), *argv[1:]], env=self.environment, cwd=self.folder, timeout=300, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return asked.returncode == 0


class Project:
    """`docker compose up`, as far as it works without an engine."""

    def __init__(self, folder: Path, job: Path, kafka: LocalKafka, redis: LocalRedis, **variables: str) -> None:
        self.services = project(JOB=job.name, JOB_FOLDER=str(job.parent), **variables)["services"]
        self.folder = folder / "var-lib-doll"
        self.folder.mkdir()
        self.containers: dict[str, Container] = {}
        self._logs = folder / "logs"
        self._job_folder = job.parent
        self._image = image()
        self._kafka, self._redis = kafka, redis

    def up(self, *names: str) -> None:
        """Start services in the order of their dependencies, each when its conditions are met."""
        for name in names:
            service = self.services[name]
            for other, of in service.get("depends_on", {}).items():
                if other not in ("prometheus", "grafana"):  # nobody stands in for them; nothing of ours asks them
                    self._await(other, of["condition"])
            for number in range(int(service.get("deploy", {}).get("replicas", 1))):
                self._start(f"{name}-{number + 1}", service)

    def _await(self, name: str, condition: str) -> None:
        if name in ("kafka", "redis"):
            assert condition == "service_healthy"
            self.until(lambda: self._stand_in_healthy(name), f"{name} is healthy")
            return
        assert condition == "service_completed_successfully"
        container = self.containers[f"{name}-1"]
        self.until(lambda: not container.running, f"{name} has ended")
        assert container.exit_codes == [0], tail(container.log)

    def _stand_in_healthy(self, name: str) -> bool:
        inside, address = ("9092", self._kafka.address) if name == "kafka" else ("6379", self._redis.address)
        match = re.search(r":(\d+)(?:/|$)", address)
        assert match is not None
        kind, *argv = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        assert any(inside in word for word in argv)
        argv = [word.replace(inside, match[1]) for word in argv]
        if argv[0] == "valkey-cli":  # the image's own: here Redis' program does the same, if there is one
            redis_cli = shutil.which("valkey-cli") or shutil.which("redis-cli")
            if redis_cli is None:
                client: Any = connect_redis(Services("", self._redis.address))
                return bool(client.ping())
            argv[0] = redis_cli
        return subprocess.run(
            [shutil.which(argv[0]) or str(BIN / argv[0]), *argv[1:]], capture_output=True, timeout=300, check=False
        ).returncode == 0  # fmt: skip

    def container(self, name: str, service: dict[str, Any], command: list[str]) -> Container:
        """As the engine would make it: entry point and environment of the image, then what the file says."""
        given = {key: value for key, value in service["environment"].items() if value is not None}  # else not there
        environment = {**self._image.environment, **given}
        assert environment["PATH"].startswith("/opt/doll/bin:")
        environment |= {
            "PATH": f"{BIN}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "DOLL_KAFKA": environment["DOLL_KAFKA"].replace("kafka:19092", self._kafka.address),
            "DOLL_REDIS": environment["DOLL_REDIS"].replace("redis://redis:6379/0", self._redis.address),
            "DOLL_JOB": environment["DOLL_JOB"].replace("/job", str(self._job_folder), 1),
            "DOLL_HEALTH_PORT": str(free_port()),  # each container has a loopback of its own
        }
        assert not {"kafka:19092", "redis:6379"} & set(environment.values())
        assert self._image.folder == "/var/lib/doll"
        program, *arguments = self._image.entrypoint
        argv = [str(BIN / program), *arguments, *command]
        return Container(name, service, argv, environment, self.folder, self._logs / f"{name}.log")

    def _start(self, name: str, service: dict[str, Any]) -> None:
        command = service["command"]
        words = shlex.split(command) if isinstance(command, str) else command  # as compose does
        self.containers[name] = self.container(name, service, words)
        self.containers[name].start()

    def run(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """`docker compose run --rm SERVICE COMMAND`."""
        container = self.container(f"{service}-run", self.services[service], list(command))
        return subprocess.run(
            container.argv,
            env=container.environment,
            cwd=container.folder,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )

    def signal(self, name: str, number: int) -> None:
        """`docker compose kill -s`."""
        process = self.containers[name].process
        assert process is not None
        process.send_signal(number)

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
        def looked() -> bool:
            for container in self.containers.values():
                container.look()
            return condition()

        def logs() -> str:
            return "\n".join(
                f"--- {container.name} ({', '.join(map(describe_exit, container.exit_codes)) or 'running'})\n"
                f"{tail(container.log, 30)}"
                for container in self.containers.values()
            )

        until(looked, lambda: f"{what}\n{logs()}", timeout_s)

    def down(self) -> None:
        """`docker compose down`."""
        running = [container for container in self.containers.values() if container.process is not None]
        for container in running:
            container.stopped = True
            assert container.process is not None
            container.process.terminate()
        for container in running:
            assert container.process is not None
            try:
                container.process.wait(30)
            except subprocess.TimeoutExpired:
                container.process.kill()
                container.process.wait()


@pytest.fixture
def stack(tmp_path: Path, broker: LocalKafka, redis_server: LocalRedis, job_name: str) -> Iterator[Project]:
    """Three workers for two slots."""
    (tmp_path / "mine").mkdir()
    job = tmp_path / "mine" / "my.yaml"
    job.write_text(JOB.format(name=job_name))
    made = Project(tmp_path, job, broker, redis_server, WORKERS="3")
    yield made
    made.down()


def scrape(container: Container) -> dict[str, float]:
    """What Prometheus would get, by name and labels."""
    url = f"http://127.0.0.1:{container.environment['DOLL_HEALTH_PORT']}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


@pytest.mark.e2e
@pytest.mark.timeout(1200)  # bounds failure only: a loaded machine is ten times as slow
def test_a_job_trains_loses_a_worker_to_sigkill_and_ends_with_its_books_balanced(
    stack: Project, job_name: str, broker: LocalKafka, redis_server: LocalRedis
) -> None:
    stack.up("topics", "ps", "worker", "producer", "evaluator", "metrics")
    containers = stack.containers
    metrics = containers["metrics-1"]
    prefix = f'job_name="{job_name}"'

    def value(name: str, labels: str = "") -> float:
        return scrape(metrics).get(f"doll_{name}{{{prefix}{labels}}}", float("nan"))

    def up() -> int:
        return sum(value("worker_live", f',worker="{number}"') == 1 for number in range(2))

    stack.until(lambda: up() == 2 and value("ps_version") >= 3, "two workers train")
    alike = [name for name in containers if name.startswith("worker")]
    held = {name: re.findall(r"slot_acquired .*worker=(\d)", containers[name].log.read_text()) for name in alike}
    assert sorted(slot for slots in held.values() for slot in slots) == ["0", "1"]
    (spare,) = (name for name in alike if not held[name])
    stack.until(
        lambda: "waiting_as_spare" in containers[spare].log.read_text(), "the third one says that it is a spare"
    )
    stack.until(
        lambda: all(
            container.healthy()
            for container in containers.values()
            if container.running and "test" in container.service["healthcheck"]
        ),
        "health checks pass",
    )

    victim = next(name for name in alike if held[name] == ["1"])
    stack.signal(victim, signal.SIGKILL)

    def logged(what: str) -> int:
        return sum(containers[name].log.read_text().count(what) for name in (spare, victim))

    # Whoever asks first when the lease has run out: the spare, or the dead container that was started again.
    stack.until(lambda: logged("slot_acquired") == 2, "a spare takes over")
    stack.until(lambda: containers[victim].restarts > 0, "the dead container is restarted")
    assert -signal.SIGKILL in containers[victim].exit_codes
    stack.until(lambda: logged(" joined ") == 2 and up() == 2, "both slots work")
    seen: list[float] = []

    def went_on() -> bool:
        seen.extend(
            version for version in [value("ps_version")] if version == version
        )  # not a number where nobody answered
        return len(seen) > 1 and seen[-1] >= seen[0] + 3

    stack.until(went_on, "training goes on")
    stack.until(lambda: value("evaluator_accuracy") > 0, "held-out error is measured")

    used = set(METRIC.findall(ALERTS.read_text())) | {
        name
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", [])
        for name in METRIC.findall(target["expr"])
    }
    # Counters of what has not happened are not there yet, and this job has no provisioner, no objective and no join.
    others = ("doll_provisioner_", "doll_freshness_objective_", "doll_joiner_")
    wanted = {name for name in used if not (name.endswith("_total") or name.startswith(others))}
    stack.until(lambda: wanted <= {key.partition("{")[0] for key in scrape(metrics)}, f"each of {sorted(wanted)}")

    stack.signal("ps-1", signal.SIGINT)  # docker compose kill -s SIGINT ps: the job ends
    working = [container for name, container in containers.items() if name != "metrics-1"]
    stack.until(
        lambda: not any(container.running for container in working), "the end of the job is the end of its processes"
    )
    assert {container.name: container.exit_codes[-1] for container in working} == {
        container.name: 0 for container in working
    }
    stack.until(lambda: value("job_finished") == 1, "the measurement of the end")

    stack.up("audit")  # docker compose --profile once up --attach audit --exit-code-from audit ends with it
    proof = containers["audit-1"]
    stack.until(lambda: not proof.running, "the audit has ended")
    assert (proof.exit_codes, proof.restarts) == ([0], 0)
    assert re.search(r"\b0 missing, 0 twice", proof.log.read_text()), tail(proof.log)
    config = load(Path(metrics.environment["DOLL_JOB"]))
    store = FileCheckpointStore(stack.folder / "runs" / job_name / "checkpoints", job_name, keep=config.checkpoint.keep)
    report = audit(config, Services(broker.address, redis_server.address), store)
    assert report.ok
    assert report.applied > 0


@pytest.mark.e2e
@pytest.mark.timeout(1200)  # bounds failure only: a loaded machine is ten times as slow
def test_the_provisioner_starts_workers_in_its_own_container(stack: Project) -> None:
    job = stack._job_folder / "my.yaml"
    job.write_text(job.read_text() + PLAN)
    stack.services["worker"]["deploy"]["replicas"] = "0"  # WORKERS=0
    stack.up("topics", "ps", "worker", "producer", "provisioner")
    ps, provisioner = stack.containers["ps-1"], stack.containers["provisioner-1"]
    asked = {container.name: False for container in (ps, provisioner)}

    def all_were_healthy() -> bool:  # the job is short: one may end before the other is asked
        for container in (ps, provisioner):
            asked[container.name] = asked[container.name] or container.healthy()
        return all(asked.values())

    stack.until(all_were_healthy, "health checks pass")
    stack.until(lambda: ps.log.read_text().count("worker_joined") >= 2, "its workers join")
    stack.until(lambda: not ps.running, "the job is done")
    stack.until(lambda: not any(container.running for container in stack.containers.values()), "all have ended")
    assert {container.exit_codes[-1] for container in stack.containers.values()} == {0}
    done = stack.run("doll", "audit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b0 missing, 0 twice", done.stdout), done.stdout
    assert stack.run("doll", "provision", "status").returncode == 0


@pytest.mark.e2e
@pytest.mark.timeout(1200)  # bounds failure only: a loaded machine is ten times as slow
def test_a_job_file_that_is_wrong_stops_topics_so_that_nothing_else_starts(stack: Project) -> None:
    job = stack._job_folder / "my.yaml"
    job.write_text(job.read_text().replace("batch_size", "batch_sice"))
    done = stack.run("topics", *stack.services["topics"]["command"])
    assert done.returncode == 2
    assert "did you mean 'batch_size'" in done.stderr
    assert stack.services["topics"]["restart"] == "no"
    roles = stack.services.keys() - IN_FOREIGN_IMAGES - {"topics"}
    needed = {"condition": "service_completed_successfully"}
    assert all(stack.services[name]["depends_on"]["topics"] == needed for name in roles)
