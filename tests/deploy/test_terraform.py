"""The stack as Terraform files: rights against what the code calls, and the finding of Terraform's provider.

What Terraform itself says is `make tf-check`; both are run by .ci/run.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from botocore import xform_name
from botocore.session import Session
from doll.run import function_boot
from paths import ROOT

from .conftest import FILES, PRODUCER

TERRAFORM = ROOT / "deploy" / "terraform"
PROVISIONER = ROOT / "doll" / "provisioner"
ABSENT = (
    "ec2:StopInstances", "ec2:ModifyInstanceAttribute", "ec2:CreateLaunchTemplate", "ec2:DeleteFleets",
    "ec2:RequestSpotInstances", "ec2:RequestSpotFleet", "iam:Create", "iam:Put", "iam:Attach", "kms:*", "s3:*", "ec2:*",
)  # fmt: skip


@pytest.fixture(scope="module")
def local() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deploy_terraform_local", TERRAFORM / "local.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def body_of(document: str) -> str:
    """What stands in a policy document of iam.tf."""
    text = (TERRAFORM / "iam.tf").read_text()
    match = re.search(rf'^data "aws_iam_policy_document" "{document}" {{(.*?)^}}', text, re.DOTALL | re.MULTILINE)
    assert match is not None
    return match[1]


def passwords(document: str) -> set[str]:
    """The secrets that a policy document names, with those of the documents that it takes in."""
    body = body_of(document)
    return set(re.findall(r"module\.secrets\.(\w+)", body)).union(
        *(passwords(other) for other in re.findall(r"aws_iam_policy_document\.(\w+)\.json", body))
    )


def granted(document: str) -> set[str]:
    """Actions of a policy document in iam.tf, with those of the documents that it takes in."""
    body = body_of(document)
    actions = set(re.findall(r'"([a-z0-9-]+:[A-Z][A-Za-z]+)"', body))
    for other in re.findall(r"aws_iam_policy_document\.(\w+)\.json", body):
        actions |= granted(other)
    return actions - {"ec2:CreateAction", "ec2:InstanceType"}  # the names of conditions


def called(session: Session, path: Path, service: str) -> set[str]:
    """Actions behind the calls of a boto3 client in a source file."""
    names = {xform_name(name): name for name in session.get_service_model(service).operation_names}
    text = path.read_text()
    calls = re.findall(r"client\.(\w+)\(", text) + re.findall(r'get_paginator\("(\w+)"\)', text)
    return {f"{service}:{names[call]}" for call in calls if call in names}


def test_the_provisioner_may_do_what_it_calls_and_little_else() -> None:
    session = Session()
    needed = set()
    for source, services in (
        ("fleets/ec2/fleet.py", ("ec2",)),
        ("fleets/ec2/launch.py", ("ec2",)),
        ("fleets/ec2/account.py", ("ec2",)),
        ("prices/ec2.py", ("ec2", "pricing")),
        ("fleets/ec2/notices.py", ("sqs",)),
    ):
        for service in services:
            needed |= called(session, PROVISIONER / source, service)
    assert {"ec2:CreateFleet", "ec2:TerminateInstances", "sqs:ReceiveMessage"} <= needed  # or the search finds nothing
    needed = {action.replace("DeleteMessageBatch", "DeleteMessage") for action in needed}
    assert needed - granted("control") == set()


def test_the_provisioner_may_do_what_it_calls_for_functions() -> None:
    needed = called(Session(), PROVISIONER / "fleets/aws_lambda/fleet.py", "lambda")
    assert needed == {"lambda:Invoke"}  # or the search finds nothing
    text = (PROVISIONER / "fleets/aws_lambda/account.py").read_text()
    asked = set(re.findall(r'"(lambda:[A-Z]\w+|ecr:[A-Z]\w+)"', text)) | {"ecr:DescribeImages"}
    assert {action for action in granted("control") if action.startswith(("lambda:", "ecr:Describe"))} == asked


def test_a_worker_in_a_function_reads_what_a_worker_on_a_host_reads() -> None:
    """Its passwords and authorities, and no parameter, image or job of the hosts."""
    assert passwords("function") == passwords("worker")
    actions = {action for action in granted("function") if not action.startswith("kafka-cluster:")}
    assert actions == {"secretsmanager:GetSecretValue", "s3:GetObject", "kms:Decrypt"}
    text = (TERRAFORM / "main.tf").read_text()
    for name in (function_boot.SECRETS_ENV, function_boot.AUTHORITIES_ENV, function_boot.BUCKET_ENV):
        assert f"      {name}" in text, "the function does not know what to fetch"


def test_the_parameter_server_may_do_what_its_store_calls() -> None:
    model = {"put_object": "PutObject", "get_object": "GetObject", "delete_object": "DeleteObject"}
    text = (ROOT / "doll" / "storage" / "s3_checkpoints.py").read_text()
    assert {f"s3:{action}" for call, action in model.items() if call in text} | {"s3:ListBucket"} <= granted("control")


@pytest.mark.parametrize(
    ("document", "scripts"),
    [
        ("control", ["common", "control", "cache", "role", "heartbeat", "drain"]),
        ("worker", ["common", "worker", "orphan"]),
        ("kafka", ["common", "broker"]),
    ],
)
def test_hosts_may_do_what_their_scripts_call(document: str, scripts: list[str]) -> None:
    actions = {
        "ssm get-parameter": {"ssm:GetParameter"},
        "secretsmanager get-secret-value": {"secretsmanager:GetSecretValue"},
        "ecr get-login-password": {"ecr:GetAuthorizationToken"},
        "s3api head-object": {"s3:GetObject"},
        "ec2 describe-instances": {"ec2:DescribeInstances"},
        "cloudwatch put-metric-data": {"cloudwatch:PutMetricData"},
    }
    text = "".join((FILES / f"{name}.sh").read_text() for name in scripts)
    calls = set(re.findall(r"\baws (\w+ [a-z-]+)", text)) - {"s3 cp", "secretsmanager put-secret-value"}
    assert calls <= set(actions), "a call that this test does not know"
    needed = {action for call in calls for action in actions[call]}
    assert needed - granted(document) == set()


def test_workers_have_no_right_on_ec2_and_nobody_has_what_would_be_too_much() -> None:
    assert not [action for action in granted("worker") if action.startswith(("ec2:", "iam:", "sqs:"))]
    for document in ("control", "worker", "kafka", "function"):
        assert not [action for action in granted(document) if action.startswith(ABSENT)]


def test_hosts_that_run_user_code_read_no_parameters_but_the_stacks_own() -> None:
    """AWS's AmazonSSMManagedInstanceCore, for Session Manager, has ssm:GetParameter on everything."""
    text = "".join(path.read_text() for path in TERRAFORM.rglob("*.tf"))
    assert not re.findall(r"policy/[A-Za-z/]+", text), "a policy of AWS's own"
    assert "aws_iam_role_policy_attachment" not in text
    role = (TERRAFORM / "modules" / "role" / "main.tf").read_text()
    actions = set(re.findall(r'"([a-z0-9]+:[A-Z][A-Za-z]+)"', role)) - {"sts:AssumeRole"}
    assert {action for action in actions if action.startswith("ssm:")} == {"ssm:UpdateInstanceInformation"}
    assert {action.split(":")[0] for action in actions} == {"ssm", "ssmmessages"}


def test_external_producers_have_a_password_of_their_own_that_only_brokers_read() -> None:
    """And no word of the cache's."""
    text = (TERRAFORM / "modules" / "secrets" / "main.tf").read_text()
    match = re.search(r'"aws_secretsmanager_secret_version" "producer" {(.*?)^}', text, re.DOTALL | re.MULTILINE)
    assert match is not None
    assert set(re.findall(r"\b(DOLL_[A-Z_]+)=", match[1])) == set(PRODUCER)
    assert "aws_secretsmanager_random_password.producer." in match[1]
    assert [document for document in ("control", "worker", "kafka") if "producer_arn" in passwords(document)] == [
        "kafka"
    ]


def test_workers_read_their_own_password_and_not_that_of_kafkas_super_user() -> None:
    """They run the task's code. The super user could delete the topics and give itself any right."""
    assert passwords("worker") == {"worker_arn", "cache_arn", "schema_registry_arn"}
    assert passwords("control") == {"clients_arn", "cache_arn", "schema_registry_arn", "authority_arns"}
    text = (TERRAFORM / "modules" / "secrets" / "main.tf").read_text()
    (worker,) = re.findall(r'"aws_secretsmanager_secret_version" "worker" {(.*?)^}', text, re.DOTALL | re.MULTILINE)
    assert re.findall(r"DOLL_KAFKA_\w+=\$\{(\S+)\}", worker) == [
        "var.worker_user", "ephemeral.aws_secretsmanager_random_password.worker.random_password",
    ]  # fmt: skip


def test_no_machine_of_another_type_than_the_workers_can_be_launched() -> None:
    """What the conditions evaluate to: deploy/terraform/tests/offline.tftest.hcl."""
    statements = re.split(r'^  (?:dynamic "statement"|statement) {$', body_of("control"), flags=re.MULTILINE)
    launches = [text for text in statements if "ec2:RunInstances" in text and "instance/*" in text]
    launches = [text for text in launches if "ec2:CreateTags" not in text]
    assert len(launches) == 1
    assert '"ec2:RunInstances" = "StringEquals"' in launches[0]
    assert '"ec2:InstanceType"\n        values   = var.worker_instance_types' in launches[0]


@pytest.mark.parametrize("module", ["kafka", "control"])  # the self-managed cache is on the control host
def test_hosts_with_data_are_protected_from_termination(module: str) -> None:
    """As the provider plans it: deploy/terraform/tests/hosts.tftest.hcl."""
    text = (TERRAFORM / "modules" / module / "main.tf").read_text()
    (instance,) = re.findall(r'^resource "aws_instance" "\w+" {(.*?)^}', text, re.DOTALL | re.MULTILINE)
    assert re.search(r"^  disable_api_termination += true$", instance, re.MULTILINE)


def test_every_exception_from_checkov_has_a_reason_of_its_own() -> None:
    lines = [
        line for path in TERRAFORM.rglob("*.tf") for line in path.read_text().splitlines() if "checkov:skip" in line
    ]
    reasons = [re.fullmatch(r"\s*# checkov:skip=CKV2?_AWS_\d+: (.+)", line) for line in lines]
    assert len(reasons) > 20
    assert [
        line for line, reason in zip(lines, reasons, strict=True) if reason is None or len(reason[1].split()) < 3
    ] == []


class FakeWorkspace:
    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder

    def run(self, *words: str, **options: object) -> str:
        return "Success! 1 passed, 0 failed."


def test_a_finding_of_checkov_fails_the_check(
    local: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"summary": {"passed": 3, "failed": 1, "skipped": 0, "parsing_errors": 0}, "results": {"failed_checks": [
        {"check_id": "CKV_AWS_8", "resource": "aws_instance.node", "check_name": "encrypt it"}
    ]}}  # fmt: skip
    commands: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1 if "--directory" in command else 0, json.dumps(report), "")

    monkeypatch.setattr(local, "unavailable_reason", lambda: None)
    monkeypatch.setattr(local, "Workspace", FakeWorkspace)
    monkeypatch.setattr(local, "_run", run)
    assert local.main(["check"]) == 1
    assert "CKV_AWS_8 aws_instance.node: encrypt it" in capsys.readouterr().out
    scan = commands[-1]
    assert {"--skip-download", "--download-external-modules"} <= set(scan)
    assert any("--require-hashes" in command and command[-1].endswith("checkov.lock") for command in commands)

    report["summary"], report["results"] = (
        {"passed": 0, "failed": 0, "skipped": 0, "parsing_errors": 0},
        {"failed_checks": []},
    )
    monkeypatch.setattr(local, "_run", lambda command: subprocess.CompletedProcess(command, 0, json.dumps(report), ""))
    assert local.main(["check"]) == 1, "it has looked at nothing"


@pytest.mark.parametrize("words", ["check", "apply"])
def test_what_is_not_checked_has_not_passed(
    local: ModuleType, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local.main([words]) == 1
    assert "NOT checked, there is no terraform on PATH: install Terraform" in capsys.readouterr().out
    (tmp_path / "terraform").touch(0o755)
    monkeypatch.setattr(local, "find_plugins", lambda: None)
    assert local.main([words]) == 1
    assert "terraform init" in capsys.readouterr().out


def test_with_msk_producers_write_samples_by_their_role_and_nothing_else() -> None:
    assert granted("producer") == {
        "kafka-cluster:Connect", "kafka-cluster:DescribeTopic", "kafka-cluster:WriteData",
        "kafka-cluster:WriteDataIdempotently",
    }  # fmt: skip
    assert '/doll.*.samples"]' in (TERRAFORM / "iam.tf").read_text()


def test_fixed_addresses_are_reserved() -> None:
    """Without reservation a worker may get a broker's address while the broker is being replaced."""
    main = (TERRAFORM / "main.tf").read_text()
    addresses = re.findall(r"\bcidrhost\(([^,\[]+)", main)
    assert addresses == ["module.network.reserved_cidrs"] * 2
    network = (TERRAFORM / "modules" / "network" / "main.tf").read_text()
    reservation = network[network.index('"aws_ec2_subnet_cidr_reservation" "fixed"') :].split("\n}\n")[0]
    assert 'reservation_type = "explicit"' in reservation


def test_the_worker_template_names_no_market_and_no_instance_type() -> None:
    """A template that names them could launch nothing else, and something might start by itself."""
    text = (TERRAFORM / "modules" / "workers" / "main.tf").read_text()
    template = text[text.index('resource "aws_launch_template"') :]
    for word in (
        "instance_market_options",
        "instance_type ",
        "instance_requirements",
        "tag_specifications {",
        "key_name",
    ):
        assert word not in template
    for word in ('instance_initiated_shutdown_behavior = "terminate"', 'http_tokens                 = "required"'):
        assert word in template


def test_no_secret_is_a_value_of_terraform() -> None:
    """Passwords come from ephemeral resources and go into write-only arguments."""
    text = "".join(path.read_text() for path in TERRAFORM.rglob("*.tf"))
    assert not re.findall(r"\bsecret_string\s*=", text)
    assert "secret_string_wo " in text


def test_a_provider_is_found_where_terraform_would_look(local: ModuleType, tmp_path: Path) -> None:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    here = f"{platform.system().lower()}_{machine}"

    def put(folder: Path, version: str, system: str = here) -> None:
        path = folder / "registry.terraform.io/hashicorp/aws" / version / system
        path.mkdir(parents=True)
        (path / f"terraform-provider-aws_v{version}_x5").touch()

    home, mirror = tmp_path / "home", tmp_path / "mirror"
    put(home / ".terraform.d/plugins", "5.100.0")
    assert home / ".terraform.d/plugins" in list(local._mirrors({"HOME": str(home)}))
    assert local._has_provider(home / ".terraform.d/plugins")

    put(mirror, "6.1.0")
    put(mirror, "5.99.1")
    put(mirror, "5.101.0", "plan9_386")
    assert not local._has_provider(mirror)  # none of ours, for this machine
    put(mirror, "5.101.0")
    assert local._has_provider(mirror)

    settings = tmp_path / "cli.tfrc"
    settings.write_text(f'provider_installation {{\n  filesystem_mirror {{\n    path = "{mirror}"\n  }}\n}}\n')
    assert local.find_plugins({"HOME": str(home), "TF_CLI_CONFIG_FILE": str(settings)}) == mirror
    assert local.find_plugins({"HOME": str(home), "TF_CLI_CONFIG_FILE": str(tmp_path / "none")}) is not None
    assert local.find_plugins({"HOME": str(home), "TF_PLUGIN_CACHE_DIR": str(mirror)}) == mirror


def test_drift_is_what_a_second_apply_would_change(local: ModuleType) -> None:
    def change(address: str, actions: list[str], mode: str = "managed") -> dict[str, object]:
        about = {
            "actions": actions,
            "before": {"x": 1, "y": 2},
            "after": {"x": 1, "y": 3},
            "after_unknown": {"z": True},
        }
        return {"address": address, "mode": mode, "change": about}

    plan = {
        "resource_changes": [
            change("a.b", ["no-op"]), change("c.d", ["update"]), change("data.e", ["read"], "data"),
            change("f.g", ["delete", "create"]),
        ]
    }  # fmt: skip
    assert local.drifted(plan) == {"c.d": ["y", "z"], "f.g": ["y", "z"]}


def test_every_file_that_a_module_reads_is_there() -> None:
    callers = [path for path in TERRAFORM.rglob("*.tf") if path.parent.name != "boot"]
    for path in callers:
        for block in re.findall(r"(?:scripts|units)\s*= \[([^\]]*)\]", path.read_text()):
            for name in re.findall(r'"([^"]+)"', block):
                assert (FILES / (name if "." in name else f"{name}.sh")).is_file(), f"{path}: {name}"
