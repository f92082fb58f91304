"""The Dockerfile, docker-compose.yml, dashboard and alerts as files: what they say, and what docker compose reads."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from compose_files import ALERTS, DASHBOARD, FILE, IN_FOREIGN_IMAGES, METRIC, project, stages
from deploy_scripts import load
from doll.formats.registry import CA_ENV, PASSWORD_ENV, TOKEN_ENV, USER_ENV
from doll.local import kafka_broker, kafka_jars
from doll.process.connections import CERT_ENV, CLIENT_CA_ENV, KEY_ENV
from doll.process.connections import TOKEN_ENV as TOKEN_OF_SERVE
from doll.process.memory import HUGE_PAGES_ENV
from fake_engine import fake_docker_engine
from paths import ROOT


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
    """Without it `--no-build` ends the build on every Mac. deploy/wheels.txt lists the packages without a wheel."""
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
    assert compiled == {line.split("==")[0] for line in table.splitlines() if line.split()[1] == "source"}
    install = next(rest for kind, rest in stages()[1] if kind == "RUN" and "uv venv" in rest)
    assert install.count("uv pip install --no-build") == 2


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
            assert ("ports" in service) == (name == "serve"), name
        for volume in service.get("volumes", []):
            if isinstance(volume, dict) and volume["type"] == "bind":
                assert volume["read_only"], name
    without_names = re.sub(r"^  DOLL_(REGISTRY|SERVE)_[A-Z_]+:$", "", FILE.read_text(), flags=re.MULTILINE)
    assert not re.search(r"(?i)password|secret|token", without_names.replace("there is no password to keep", ""))


def test_only_who_asks_the_schema_registry_gets_its_variables_and_their_values_are_not_in_the_file() -> None:
    read = {USER_ENV, PASSWORD_ENV, f"{PASSWORD_ENV}_FILE", TOKEN_ENV, f"{TOKEN_ENV}_FILE", CA_ENV}
    for name, service in project()["services"].items():
        given = {key: value for key, value in service.get("environment", {}).items() if "REGISTRY" in key}
        wanted = read if name in {"worker", "provisioner", "doll"} else set()
        assert given == dict.fromkeys(wanted), name


def test_only_the_model_server_gets_who_may_ask_it() -> None:
    """Without any of them it does not start: other containers reach it."""
    read = {TOKEN_OF_SERVE, f"{TOKEN_OF_SERVE}_FILE", CERT_ENV, KEY_ENV, CLIENT_CA_ENV}
    services = project()["services"]
    for name, service in services.items():
        given = {key: value for key, value in service.get("environment", {}).items() if key.startswith("DOLL_SERVE")}
        assert given == dict.fromkeys(read if name == "serve" else set()), name
    serve = services["serve"]
    assert serve["profiles"] == ["serve"]
    assert serve["command"] == ["serve", "--host", "0.0.0.0"]
    assert serve["ports"] == ["127.0.0.1:8000:8000"]
    assert serve["restart"] == "on-failure"
    assert serve["environment"]["DOLL_FINAL_EXIT_CODE"] == "0", "nor is it started again and again"


def test_the_joiner_keeps_what_does_not_fit_into_its_memory_on_disk() -> None:
    """Every job has the service: without data.join it ends with exit code 0, and is not started again."""
    services = project()["services"]
    join = services["join"]
    assert (join["command"], join.get("profiles"), join["tmpfs"]) == (["join"], None, [])
    assert {"type": "volume", "target": "/tmp"} in join["volumes"]
    assert [volume for volume in join["volumes"] if volume["target"] != "/tmp"] == services["worker"]["volumes"]
    assert (join["restart"], join["environment"]["DOLL_FINAL_EXIT_CODE"]) == ("on-failure", "0")


def test_shards_start_only_if_asked_for() -> None:
    shard = project()["services"]["shard"]
    assert (shard["command"], shard["deploy"]["replicas"], shard.get("profiles")) == (["shard"], "0", None)


def test_every_extra_of_a_role_is_in_the_image_whichever_torch_it_has() -> None:
    install = next(rest for kind, rest in stages()[1] if kind == "RUN" and "uv venv" in rest)
    for extra in ("avro", "join", "kubernetes", "plots", "protobuf", "provision", "serve"):
        assert len(re.findall(rf"--extra {extra}\b", install)) == 2, extra


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
    """Compose drops the label where `create_host_path` is false: its call of the engine then has no label."""
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
    assert service["image"] == f"apache/kafka:{kafka_jars.version()}"
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


def test_a_job_outside_the_containers_finds_both_services_where_the_file_publishes_them() -> None:
    services = project(KAFKA_PORT="29092", REDIS_PORT="26379")["services"]
    assert services["kafka"]["ports"] == ["127.0.0.1:29092:9092"]
    assert "HOST://127.0.0.1:29092" in services["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    assert services["redis"]["ports"] == ["127.0.0.1:26379:6379"]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (None, "there is no docker on PATH: install Docker Engine"),
        ("exit 1", "no docker engine answers: start it"),
        ('[ "$1" = info ]', "docker has no compose v2: install its compose plugin"),
    ],
)
def test_the_check_on_an_engine_has_not_passed_where_there_is_none(
    program: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if program is not None:
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = load("compose_check")
    monkeypatch.setattr(check, "DOCKER", "docker")
    assert check.main() == 1
    assert said in capsys.readouterr().out


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
        "up", "build", "up --build", "--profile watch up", "--profile provision up", "--profile serve up",
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
