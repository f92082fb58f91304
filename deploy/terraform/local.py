"""Checks of the stack without an AWS account and without network access.

    make tf-check        (local.py check) fmt, validate, terraform test, checkov
    make tf-apply-local  (local.py apply) apply and destroy it against a moto server on loopback

Terraform and its AWS provider must be installed on this machine: without them both fail, since what is not checked has
not passed. checkov comes from the package index at the first check, by the hashes of checkov.lock, into an environment
of its own (.venv/checkov): DOLL's own environment and lock do not have it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
PROVIDER: Final = Path("registry.terraform.io/hashicorp/aws")
_SUPPORTED: Final = ((5, 100), (6,))  # versions.tf
_MIRROR: Final = re.compile(r'^\s*path\s*=\s*"([^"]+)"', re.MULTILINE)
_STEP_S: Final = 1800.0
CHECKOV: Final = HERE.parents[1] / ".venv" / "checkov"

NAME: Final = "local"
REGION: Final = "us-east-1"
VARIABLES: Final = {
    "name": NAME, "image_tag": "v1", "kafka_mode": "self_managed", "region": REGION, "force_destroy": True,
    "alarm_email": "oncall@example.com",
}  # fmt: skip
# moto 5.2.5 returns other values for these than were set. By resource, not by attribute: Terraform shows no reasons.
KNOWN_DRIFT: Final = {
    "module.workers.aws_launch_template.this": "moto returns the template's own tags as those of its instances",
    "module.control.aws_ssm_parameter.settings": "it contains the template's version, unknown while that is to change",
    "module.control.aws_instance.this": "moto drops the security groups of an instance with a fixed address",
    "module.kafka.aws_instance.node": "moto drops the security groups of an instance with a fixed address",
    "module.network.aws_vpc_security_group_ingress_rule.path": "moto drops descriptions of rules with a group",
    "module.network.aws_vpc_security_group_egress_rule.path": "moto drops descriptions of rules with a group",
}

_NO_RETRIES: Final = """
provider "aws" {
  max_retries = 1
}

provider "aws" {
  alias       = "passwords"
  max_retries = 1
}
"""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# --- Terraform and its provider ---------------------------------------------------------------------------------------


def unavailable_reason() -> str | None:
    """None if the stack can be checked on this machine; else what is missing."""
    if shutil.which("terraform") is None:
        return "there is no terraform on PATH: install Terraform 1.11 or later (developer.hashicorp.com/terraform)"
    if find_plugins() is None:
        return (
            "terraform's AWS provider (5.100 or later, before 6) is not on this machine; run `terraform init` in "
            "deploy/terraform once, or put it into a filesystem mirror"
        )
    return None


def find_plugins(environment: dict[str, str] | None = None) -> Path | None:
    """A folder in the layout of a filesystem mirror with an unpacked supported provider for this machine."""
    return next((folder for folder in _mirrors(environment or dict(os.environ)) if _has_provider(folder)), None)


def _mirrors(environment: dict[str, str]) -> Iterator[Path]:
    """The folders that Terraform itself searches, then /opt."""
    home = Path(environment.get("HOME", "/"))
    if cache := environment.get("TF_PLUGIN_CACHE_DIR"):
        yield Path(cache)
    for settings in (Path(environment.get("TF_CLI_CONFIG_FILE") or home / ".terraformrc"), home / ".terraformrc"):
        if settings.is_file():
            yield from map(Path, _MIRROR.findall(settings.read_text(encoding="utf-8", errors="replace")))
    yield HERE / ".terraform" / "providers"  # after `terraform init` here
    yield HERE / "terraform.d" / "plugins"
    yield home / ".terraform.d" / "plugins"
    yield Path(environment.get("XDG_DATA_HOME") or home / ".local" / "share") / "terraform" / "plugins"
    yield Path("/usr/local/share/terraform/plugins")
    yield Path("/usr/share/terraform/plugins")
    yield from sorted(Path("/opt").glob("*"))


def _has_provider(folder: Path) -> bool:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    here = f"{platform.system().lower()}_{machine}"
    return any(
        _SUPPORTED[0] <= _version(binary.parent.parent.name) < _SUPPORTED[1]
        for binary in (folder / PROVIDER).glob(f"*/{here}/terraform-provider-aws*")
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


# --- running Terraform ------------------------------------------------------------------------------------------------


class StepFailed(Exception):
    """A step has failed; the message has Terraform's output."""


class Workspace:
    """A copy of the stack in a separate folder, so that the checkout is not changed.

    Args:
        folder: an empty folder.
        environment: additions to Terraform's environment.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        plugins = find_plugins()
        assert plugins is not None, "unavailable_reason() has checked"
        self.folder = folder / "stack"
        unwanted = shutil.ignore_patterns(
            ".terraform*", "*.tfstate*", "terraform.tfvars*", "*.auto.tfvars*", "__pycache__"
        )
        shutil.copytree(HERE, self.folder, ignore=unwanted)
        settings = folder / "terraform.rc"  # not the user's, which may name mirrors on the network
        settings.write_text("disable_checkpoint = true\n", encoding="utf-8")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("TF_", "AWS_"))}
        self._environment = {
            **kept,
            "TF_CLI_CONFIG_FILE": str(settings),
            "TF_IN_AUTOMATION": "1",
            "TF_INPUT": "0",
            "AWS_EC2_METADATA_DISABLED": "true",
            **environment,
        }
        self.run("init", f"-plugin-dir={plugins}", "-backend=false" if not environment else "-reconfigure")

    def run(self, *words: str, ok: Sequence[int] = (0,), on_line: Callable[[str], None] | None = None) -> str:
        """Run Terraform and return its output.

        Args:
            words: arguments of Terraform.
            ok: exit codes that are not a failure.
            on_line: called with each line of output.

        Raises:
            StepFailed: another exit code, or no exit within half an hour.
        """
        lines: list[str] = []
        started_s = time.monotonic()
        with subprocess.Popen(
            ["terraform", *words, *(["-no-color"] if "-json" not in words and words[0] != "fmt" else [])],
            cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, preexec_fn=_die_with_parent,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    lines.append(line)
                    if on_line is not None:
                        on_line(line.rstrip("\n"))
                    if time.monotonic() - started_s > _STEP_S:
                        raise StepFailed(
                            f"terraform {words[0]} did not exit within {_STEP_S:g} s:\n{''.join(lines[-40:])}"
                        )
            except BaseException:
                process.terminate()  # it stops its provider, too
                raise
        if process.returncode not in ok:
            raise StepFailed(f"terraform {' '.join(words)}: exit code {process.returncode}\n{''.join(lines[-80:])}")
        return "".join(lines)


def _die_with_parent() -> None:
    """Have Linux send SIGTERM when the parent ends, so that Terraform stops its provider, unlike with SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@contextmanager
def step(what: str) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    say(f"  {what:<48} {time.monotonic() - started_s:6.1f} s")


def check() -> None:
    """fmt, validate, terraform test in its two offline modes, and checkov.

    Raises:
        StepFailed: one of them failed.
    """
    with tempfile.TemporaryDirectory(prefix="doll-terraform-") as folder:
        with step("init"):
            stack = Workspace(Path(folder), {})
        with step("fmt -check"):
            stack.run("fmt", "-check", "-recursive", "-diff")
        with step("validate"):
            stack.run("validate")
        with step("test"):
            output = stack.run("test", on_line=lambda line: say(f"    {line.strip()}") if "... " in line else None)
        say(f"  {output.strip().splitlines()[-1]}")
        with step("checkov"):
            summary = scan(stack.folder)
        say(f"  checkov: {summary}")


def scan(folder: Path) -> str:
    """Run checkov over a copy of the stack, without a call to anything but the package index; what it has counted.

    An exception is a comment at its resource, `checkov:skip=ID: reason`.

    Raises:
        StepFailed: it cannot be installed, or cannot read a file, or has a finding.
    """
    uv, python = str(Path(sys.executable).with_name("uv")), str(CHECKOV / "bin" / "python")
    lock = str(HERE / "checkov.lock")
    for command in (
        [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(CHECKOV)],
        [uv, "pip", "sync", "--quiet", "--require-hashes", "--python", python, lock],
    ):
        done = _run(command)
        if done.returncode:
            raise StepFailed(f"checkov cannot be installed into {CHECKOV}; it needs the package index\n{done.stderr}")
    done = _run(
        [str(CHECKOV / "bin" / "checkov"), "--directory", str(folder), "--framework", "terraform", "--output", "json",
         "--compact", "--skip-download", "--download-external-modules", "false"]
    )  # fmt: skip
    try:
        report = json.loads(done.stdout)
        counted, findings = report["summary"], report["results"]["failed_checks"]
    except (ValueError, KeyError, TypeError):
        raise StepFailed(f"checkov: exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}") from None
    lines = [f"{finding['check_id']} {finding['resource']}: {finding['check_name']}" for finding in findings]
    if done.returncode or lines or counted["parsing_errors"] or not counted["passed"]:
        raise StepFailed("\n".join([f"checkov: exit code {done.returncode}, {counted}", *lines]))
    return f"{counted['passed']} passed, {counted['skipped']} skipped with a reason in the files"


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run it without the keys of checkov's platform, to which it would send what it finds."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("BC_", "CKV_", "PRISMA_", "TF_"))}
    quiet = {"CKV_SKIP_PACKAGE_UPDATE_CHECK": "true", "LOG_LEVEL": "ERROR"}
    return subprocess.run(
        command, env={**kept, **quiet}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_STEP_S,
        check=False, preexec_fn=_die_with_parent,
    )  # fmt: skip


# --- against moto -----------------------------------------------------------------------------------------------------


def apply() -> None:
    """Apply the stack against moto, inspect it, plan again, destroy it, and check that nothing is left.

    Raises:
        StepFailed: a step failed, there is unknown drift, or resources are left.
    """
    os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"  # read when moto is imported
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        say(f"moto on {endpoint}")
        with tempfile.TemporaryDirectory(prefix="doll-terraform-") as folder:
            _apply(Path(folder), endpoint)
    finally:
        server.stop()


def _apply(folder: Path, endpoint: str) -> None:
    account = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": REGION,
    }
    os.environ.update(account)  # for the clients of this process
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    stack = Workspace(folder, account)
    (stack.folder / "local.auto.tfvars.json").write_text(json.dumps(VARIABLES), encoding="utf-8")
    # moto answers unknown calls with 500, which the provider would retry for many minutes.
    (stack.folder / "local_override.tf").write_text(_NO_RETRIES, encoding="utf-8")
    before = inventory()

    with step("apply"):
        stack.run("apply", "-auto-approve", "-json", on_line=_Progress())
    num_resources = len([line for line in stack.run("state", "list").splitlines() if ".data." not in f".{line}"])
    say(f"  {num_resources} resources")
    outputs = {key: value["value"] for key, value in json.loads(stack.run("output", "-json")).items()}
    try:
        with step("inspect"):
            inspect(outputs, stack.folder / "terraform.tfstate", folder)
        with step("plan again"):
            stack.run("plan", "-detailed-exitcode", "-out=again", ok=(0, 2))
        drift = drifted(json.loads(stack.run("show", "-json", "again")))
        known = [address for address in drift if address.split("[")[0] in KNOWN_DRIFT]
        say(f"  drift: {len(drift)} resources, {len(known)} of them known differences of moto")
        for address, names in drift.items():
            say(f"    {address}: {', '.join(names)}")
        unknown = {address: names for address, names in drift.items() if address not in known}
    finally:
        with step("destroy"):
            stack.run("destroy", "-auto-approve", "-json", on_line=_Progress())
    left = {kind: sorted(names - before[kind]) for kind, names in inventory().items() if names - before[kind]}
    say(f"  left in the state: {len(stack.run('state', 'list').split())}; left in the account: {left or 'nothing'}")
    if unknown:
        raise StepFailed(f"expected no drift except moto's known differences, got {unknown}")
    if left:
        raise StepFailed(f"expected nothing after destroy, got {left}")


class _Progress:
    """Progress of `terraform apply -json`: one line for ten resources."""

    def __init__(self) -> None:
        self._done = 0

    def __call__(self, line: str) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return
        address = event.get("hook", {}).get("resource", {}).get("addr", "")
        if event.get("type") == "apply_complete" and ".data." not in f".{address}":
            self._done += 1
            if self._done % 10 == 0:
                say(f"    {self._done}: {address}")
        elif event.get("@level") == "error":
            say(f"    {event['@message']}")


def drifted(plan: dict[str, Any]) -> dict[str, list[str]]:
    """What a second apply would change: addresses, each with the names of its attributes that differ."""
    drift = {}
    for resource in plan.get("resource_changes", ()):
        change = resource["change"]
        if resource.get("mode") == "managed" and change["actions"] != ["no-op"]:
            before, after = change.get("before") or {}, change.get("after") or {}
            unknown = change.get("after_unknown") or {}
            names = sorted(
                key for key in {*before, *after, *unknown} if unknown.get(key) or before.get(key) != after.get(key)
            )
            drift[resource["address"]] = names
    return drift


def inspect(outputs: dict[str, Any], state: Path, folder: Path) -> None:
    """Use the created resources as doll does.

    Raises:
        StepFailed: one differs from what doll expects.
    """
    import boto3

    names, secrets = outputs["names"], boto3.client("secretsmanager")

    # 1. The state contains no password; the secrets are env files of one user each.
    def values_of(secret: str) -> dict[str, str]:
        text = secrets.get_secret_value(SecretId=secret)["SecretString"]
        return dict(line.split("=", 1) for line in text.splitlines())

    settings = outputs["settings"]
    users = {
        "doll": values_of(names["clients_secret"]),
        settings["kafka.worker_user"]: values_of(names["worker_secret"]),
        settings["kafka.producer_user"]: values_of(names["producer_secret"]),
    }
    _require(
        len(users) == 3
        and all(
            values.keys() == {"DOLL_KAFKA_USERNAME", "DOLL_KAFKA_PASSWORD"} and values["DOLL_KAFKA_USERNAME"] == user
            for user, values in users.items()
        ),
        f"expected a secret with name and password for each of Kafka's users {', '.join(users)}",
    )
    cache = values_of(f"doll/{NAME}/cache")
    _require(cache.keys() == {"DOLL_REDIS_USERNAME", "DOLL_REDIS_PASSWORD"}, "the cache's secret is not its user")
    passwords = {values["DOLL_KAFKA_PASSWORD"] for values in users.values()} | {cache["DOLL_REDIS_PASSWORD"]}
    _require({len(password) for password in passwords} == {32} and len(passwords) == 4, "passwords are shared or short")
    written = state.read_text(encoding="utf-8")
    _require(not any(password in written for password in passwords), "the state contains a password")

    # 2. The parameters that hosts read at boot equal the outputs.
    ssm = boto3.client("ssm")
    for kind in ("environment", "settings"):
        value = ssm.get_parameter(Name=f"/doll/{NAME}/{kind}")["Parameter"]["Value"]
        _require(dict(line.split("=", 1) for line in value.splitlines()) == outputs[kind], f"parameter {kind} differs")

    # 3. doll accepts the settings, and its EC2 fleet launches from the template and terminates the machine.
    from doll.config import Ec2FleetConfig, parse
    from doll.provisioner.fleets.ec2 import fleet as ec2_fleet
    from doll.provisioner.fleets.port import Order

    overrides = [f"{key}={value}" for key, value in outputs["settings"].items()]
    job = parse("job: local\ntask: {class: 'examples.synthetic.task:Gaussian'}", overrides, base_folder=folder)
    _require(isinstance(job.fleet, Ec2FleetConfig), "the settings do not name an EC2 fleet")
    fleet = ec2_fleet.connect(job)
    launched = fleet.launch(Order(slot=0, incarnation=1, market="spot"))
    _require(
        [instance.id for instance in fleet.instances() if instance.is_alive] == [launched.id],
        "the launched worker is not listed",
    )
    fleet.terminate([launched.id])
    _require(not any(instance.is_alive for instance in fleet.instances()), "the worker is not terminated")
    fleet.close()

    # 4. The stack's own machines do not carry the provisioner's tag.
    ec2 = boto3.client("ec2")
    living = [
        instance
        for reservation in ec2.describe_instances()["Reservations"]
        for instance in reservation["Instances"]
        if instance["State"]["Name"] == "running"
    ]
    tags = [{tag["Key"] for tag in instance["Tags"]} for instance in living]
    _require(len(living) == 4, f"expected the control host and three brokers, got {len(living)} machines")
    _require(
        all("doll:stack" in keys and "doll:cluster" not in keys for keys in tags),
        "a machine of the stack carries doll:cluster",
    )

    # 5. Every kind of notice is sent to the provisioner's queue, and the queue permits it.
    events, sqs = boto3.client("events"), boto3.client("sqs")
    queue = sqs.get_queue_attributes(QueueUrl=names["notices_queue"], AttributeNames=["QueueArn", "Policy"])[
        "Attributes"
    ]
    (statement,) = json.loads(queue["Policy"])["Statement"]
    may_send = set(statement["Condition"]["ArnEquals"]["aws:SourceArn"])
    kinds = set()
    for rule in events.list_rules(NamePrefix=f"doll-{NAME}-")["Rules"]:
        (target,) = events.list_targets_by_rule(Rule=rule["Name"])["Targets"]
        _require(
            target["Arn"] == queue["QueueArn"] and rule["Arn"] in may_send, f"{rule['Name']} does not reach the queue"
        )
        kinds |= set(json.loads(rule["EventPattern"])["detail-type"])
    _require("EC2 Spot Instance Interruption Warning" in kinds and len(kinds) == 3, f"notices are {sorted(kinds)}")

    # 6. Workers cannot read the password of Kafka's super user, and instances have the workers' types only.
    def statements(role: str) -> list[dict[str, Any]]:
        policy = boto3.client("iam").get_role_policy(RoleName=f"{NAME}-{role}", PolicyName=role)["PolicyDocument"]
        return [
            {**statement, **{key: _listed(statement[key]) for key in ("Action", "Resource")}}
            for statement in policy["Statement"]
        ]

    readable = {
        resource.split(":secret:")[1].rpartition("-")[0]
        for statement in statements("worker")
        if "secretsmanager:GetSecretValue" in statement["Action"]
        for resource in statement["Resource"]
    }
    _require(readable == {f"doll/{NAME}/worker", f"doll/{NAME}/cache"}, f"workers read the secrets {sorted(readable)}")
    for statement in statements("control"):
        if "ec2:RunInstances" in statement["Action"] and any("instance/*" in item for item in statement["Resource"]):
            types = statement["Condition"]["StringEquals"].get("ec2:InstanceType", ())
            _require(
                sorted(_listed(types)) == sorted(json.loads(settings["fleet.instance_types"])),
                f"expected launches of the workers' types only, got {types or 'all'}",
            )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StepFailed(otherwise)


def inventory() -> dict[str, set[str]]:
    """The account's resources by kind that could be left behind, cost money or cause conflicts."""
    import boto3

    ec2, iam = boto3.client("ec2"), boto3.client("iam")

    def listed(service: str, call: str, key: str, name: str | None) -> set[str]:
        pages = boto3.client(service).get_paginator(call).paginate()
        return {entry[name] if name else entry for page in pages for entry in page.get(key, ())}

    return {
        "instances": {
            instance["InstanceId"]
            for reservation in ec2.describe_instances()["Reservations"]
            for instance in reservation["Instances"]
            if instance["State"]["Name"] != "terminated"
        },
        "volumes": listed("ec2", "describe_volumes", "Volumes", "VolumeId"),
        "vpcs": listed("ec2", "describe_vpcs", "Vpcs", "VpcId"),
        "subnets": listed("ec2", "describe_subnets", "Subnets", "SubnetId"),
        "security groups": listed("ec2", "describe_security_groups", "SecurityGroups", "GroupId"),
        "launch templates": listed("ec2", "describe_launch_templates", "LaunchTemplates", "LaunchTemplateId"),
        "addresses": {address["AllocationId"] for address in ec2.describe_addresses()["Addresses"]},
        "gateways": {
            gateway["NatGatewayId"]
            for gateway in ec2.describe_nat_gateways()["NatGateways"]
            if gateway["State"] != "deleted"
        },
        "endpoints": {
            endpoint["VpcEndpointId"]
            for endpoint in ec2.describe_vpc_endpoints()["VpcEndpoints"]
            if endpoint["State"] != "deleted"
        },
        "roles": {role["RoleName"] for role in iam.list_roles()["Roles"]},
        "profiles": {profile["InstanceProfileName"] for profile in iam.list_instance_profiles()["InstanceProfiles"]},
        "buckets": {bucket["Name"] for bucket in boto3.client("s3").list_buckets()["Buckets"]},
        "repositories": listed("ecr", "describe_repositories", "repositories", "repositoryName"),
        "queues": set(boto3.client("sqs").list_queues().get("QueueUrls", ())),
        "rules": {rule["Name"] for rule in boto3.client("events").list_rules()["Rules"]},
        "topics": listed("sns", "list_topics", "Topics", "TopicArn"),
        "alarms": listed("cloudwatch", "describe_alarms", "MetricAlarms", "AlarmName"),
        "dashboards": listed("cloudwatch", "list_dashboards", "DashboardEntries", "DashboardName"),
        "log groups": listed("logs", "describe_log_groups", "logGroups", "logGroupName"),
        "secrets": listed("secretsmanager", "list_secrets", "SecretList", "Name"),
        "parameters": {
            name
            for name in (parameter["Name"] for parameter in boto3.client("ssm").describe_parameters()["Parameters"])
            if name.startswith("/doll/")
        },
        "aliases": listed("kms", "list_aliases", "Aliases", "AliasName"),
    }


def main(words: Sequence[str]) -> int:
    commands = {"check": check, "apply": apply}
    if len(words) != 1 or words[0] not in commands:
        say(f"expected one of {', '.join(commands)}, got {' '.join(words) or 'nothing'}")
        return 2
    if (problem := unavailable_reason()) is not None:
        say(f"terraform {words[0]}: NOT checked, {problem}")
        return 1
    started_s = time.monotonic()
    try:
        commands[words[0]]()
    except StepFailed as failed:
        say(str(failed))
        return 1
    say(f"terraform {words[0]}: passed, {time.monotonic() - started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
