"""What can be known of the stack without an AWS account, and without any network.

    make tf-check        (local.py check) fmt, validate, terraform test
    make tf-apply-local  (local.py apply) apply and destroy it against a moto server on loopback

Terraform and its AWS provider are used as this machine has them. Where either is missing this says so, and is no
failure.
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
_OURS: Final = ((5, 100), (6,))  # versions.tf
_MIRROR: Final = re.compile(r'^\s*path\s*=\s*"([^"]+)"', re.MULTILINE)
_STEP_S: Final = 1800.0

NAME: Final = "local"
VARIABLES: Final = {"name": NAME, "image_tag": "v1", "kafka_mode": "self_managed", "region": "us-east-1"}
# moto answers these with something else than what was put in (reference: moto 5.2.5). By resource, not by attribute:
# Terraform shows no reasons.
KNOWN_DRIFT: Final = {
    "module.workers.aws_launch_template.this": "moto hands the template's own tags out as those of its instances",
    "module.control.aws_ssm_parameter.settings": "it holds the template's version, unknown while that is to change",
    "module.control.aws_instance.this": "moto forgets the security groups of an instance that is given its address",
    "module.kafka.aws_instance.node": "moto forgets the security groups of an instance that is given its address",
    "module.network.aws_vpc_security_group_ingress_rule.path": "moto forgets descriptions of rules that name a group",
    "module.network.aws_vpc_security_group_egress_rule.path": "moto forgets descriptions of rules that name a group",
}

_ONE_TRY: Final = """
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


# --- finding Terraform and its provider -------------------------------------------------------------------------------


def unavailable_reason() -> str | None:
    """None if the stack can be checked here; else what is missing."""
    if shutil.which("terraform") is None:
        return "there is no terraform on PATH"
    if find_plugins() is None:
        return (
            "terraform's AWS provider (5.100 or later, before 6) is not on this machine; run `terraform init` in "
            "deploy/terraform once, or put it into a filesystem mirror"
        )
    return None


def find_plugins(environment: dict[str, str] | None = None) -> Path | None:
    """A folder in the layout of a filesystem mirror that holds a provider of ours, unpacked, for this machine."""
    return next((folder for folder in _mirrors(environment or dict(os.environ)) if _has_provider(folder)), None)


def _mirrors(environment: dict[str, str]) -> Iterator[Path]:
    """What Terraform itself would look through, then add-on software in its usual place."""
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
        _OURS[0] <= _version(found.parent.parent.name) < _OURS[1]
        for found in (folder / PROVIDER).glob(f"*/{here}/terraform-provider-aws*")
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


# --- running it -------------------------------------------------------------------------------------------------------


class StepFailed(Exception):
    """A step of Terraform's has failed; the message is what it printed."""


class Workspace:
    """A copy of the stack in a folder of its own, so that nothing is left in the checkout.

    Args:
        folder: empty.
        environment: additions to Terraform's environment.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        plugins = find_plugins()
        assert plugins is not None, "unavailable_reason() has looked"
        self.folder = folder / "stack"
        unwanted = shutil.ignore_patterns(
            ".terraform*", "*.tfstate*", "terraform.tfvars*", "*.auto.tfvars*", "__pycache__"
        )
        shutil.copytree(HERE, self.folder, ignore=unwanted)
        settings = folder / "terraform.rc"  # not the user's: it may name mirrors on the network
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

    def run(self, *words: str, ok: Sequence[int] = (0,), seen: Callable[[str], None] | None = None) -> str:
        """Terraform's output, once it has ended.

        Args:
            ok: exit codes that are no failure.
            seen: told each line as it comes.

        Raises:
            StepFailed: it ends otherwise, or not within half an hour.
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
                    if seen is not None:
                        seen(line.rstrip("\n"))
                    if time.monotonic() - started_s > _STEP_S:
                        raise StepFailed(
                            f"terraform {words[0]} has not ended within {_STEP_S:g} s:\n{''.join(lines[-40:])}"
                        )
            except BaseException:
                process.terminate()  # it ends its provider, too
                raise
        if process.returncode not in ok:
            raise StepFailed(f"terraform {' '.join(words)}: exit code {process.returncode}\n{''.join(lines[-80:])}")
        return "".join(lines)


def _die_with_parent() -> None:
    """Have the kernel send SIGTERM when we die: Terraform then ends its provider. SIGKILL would leave that behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@contextmanager
def step(what: str) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    say(f"  {what:<48} {time.monotonic() - started_s:6.1f} s")


def check() -> None:
    """fmt, validate, and terraform test in its two offline modes.

    Raises:
        StepFailed: one of them.
    """
    with tempfile.TemporaryDirectory(prefix="doll-terraform-") as folder:
        with step("init"):
            stack = Workspace(Path(folder), {})
        with step("fmt -check"):
            stack.run("fmt", "-check", "-recursive", "-diff")
        with step("validate"):
            stack.run("validate")
        with step("test"):
            told = stack.run("test", seen=lambda line: say(f"    {line.strip()}") if "... " in line else None)
        say(f"  {told.strip().splitlines()[-1]}")


# --- against moto -----------------------------------------------------------------------------------------------------


def apply() -> None:
    """Apply the stack against moto, look at it, plan again, destroy it, look again.

    Raises:
        StepFailed: a step fails, something unknown drifts, or something is left.
    """
    os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"  # read when moto is imported
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells each request
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
        "AWS_DEFAULT_REGION": VARIABLES["region"],
    }
    os.environ.update(account)  # for our own clients
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    stack = Workspace(folder, account)
    (stack.folder / "local.auto.tfvars.json").write_text(json.dumps(VARIABLES), encoding="utf-8")
    # What moto does not know it answers with 500, which the provider would ask again for many minutes.
    (stack.folder / "local_override.tf").write_text(_ONE_TRY, encoding="utf-8")
    before = inventory()

    with step("apply"):
        stack.run("apply", "-auto-approve", "-json", seen=_Progress())
    num_resources = len([line for line in stack.run("state", "list").splitlines() if ".data." not in f".{line}"])
    say(f"  {num_resources} resources")
    outputs = {key: value["value"] for key, value in json.loads(stack.run("output", "-json")).items()}
    try:
        with step("look at it"):
            inspect(outputs, stack.folder / "terraform.tfstate", folder)
        with step("plan again"):
            stack.run("plan", "-detailed-exitcode", "-out=again", ok=(0, 2))
        drift = drifted(json.loads(stack.run("show", "-json", "again")))
        known = [address for address in drift if address.split("[")[0] in KNOWN_DRIFT]
        say(f"  drift: {len(drift)} resources, {len(known)} of them known to be moto's own")
        for address, names in drift.items():
            say(f"    {address}: {', '.join(names)}")
        unknown = {address: names for address, names in drift.items() if address not in known}
    finally:
        with step("destroy"):
            stack.run("destroy", "-auto-approve", "-json", seen=_Progress())
    left = {kind: sorted(found - before[kind]) for kind, found in inventory().items() if found - before[kind]}
    say(f"  left in the state: {len(stack.run('state', 'list').split())}; left in the account: {left or 'nothing'}")
    if unknown:
        raise StepFailed(f"drift that is not known: {unknown}")
    if left:
        raise StepFailed(f"left after destroy: {left}")


class _Progress:
    """Of `terraform apply -json`: a line for each ten resources."""

    def __init__(self) -> None:
        self._done = 0

    def __call__(self, line: str) -> None:
        try:
            told = json.loads(line)
        except ValueError:
            return
        address = told.get("hook", {}).get("resource", {}).get("addr", "")
        if told.get("type") == "apply_complete" and ".data." not in f".{address}":
            self._done += 1
            if self._done % 10 == 0:
                say(f"    {self._done}: {address}")
        elif told.get("@level") == "error":
            say(f"    {told['@message']}")


def drifted(plan: dict[str, Any]) -> dict[str, list[str]]:
    """What a second apply would change: addresses, each with the names of its attributes that differ."""
    found = {}
    for change in plan.get("resource_changes", ()):
        about = change["change"]
        if change.get("mode") == "managed" and about["actions"] != ["no-op"]:
            before, after = about.get("before") or {}, about.get("after") or {}
            later = about.get("after_unknown") or {}
            names = sorted(
                key for key in {*before, *after, *later} if later.get(key) or before.get(key) != after.get(key)
            )
            found[change["address"]] = names
    return found


def inspect(outputs: dict[str, Any], state: Path, folder: Path) -> None:
    """Use what was made as doll would.

    Raises:
        StepFailed: something is not as it should be.
    """
    import boto3

    names, secrets = outputs["names"], boto3.client("secretsmanager")

    # 1. No password has gone through the state; the secret is an env file that holds four values.
    def held_in(secret: str) -> dict[str, str]:
        text = secrets.get_secret_value(SecretId=secret)["SecretString"]
        return dict(line.split("=", 1) for line in text.splitlines())

    held, producer = held_in(names["clients_secret"]), held_in(names["producer_secret"])
    _require(len(held) == 4 and len(held["DOLL_KAFKA_PASSWORD"]) == 32, "the clients' secret is not what hosts expect")
    _require(
        producer.keys() == {"DOLL_KAFKA_USERNAME", "DOLL_KAFKA_PASSWORD"}
        and producer["DOLL_KAFKA_USERNAME"] == outputs["settings"]["kafka.producer_user"]
        and producer["DOLL_KAFKA_PASSWORD"] not in held.values(),
        "external producers have no log-in of their own, or know more than theirs",
    )
    written = state.read_text(encoding="utf-8")
    passwords = {value for one in (held, producer) for key, value in one.items() if "PASSWORD" in key}
    _require(not any(password in written for password in passwords), "the state holds a password")

    # 2. What hosts read at boot is what the outputs say.
    ssm = boto3.client("ssm")
    for kind in ("environment", "settings"):
        found = ssm.get_parameter(Name=f"/doll/{NAME}/{kind}")["Parameter"]["Value"]
        _require(dict(line.split("=", 1) for line in found.splitlines()) == outputs[kind], f"parameter {kind} differs")

    # 3. doll takes the settings, and its EC2 fleet launches from the template and hands the machine back.
    from doll.config import Ec2FleetConfig, parse
    from doll.provisioner.fleets.ec2 import fleet as ec2_fleet
    from doll.provisioner.fleets.port import Order

    overrides = [f"{key}={value}" for key, value in outputs["settings"].items()]
    job = parse("job: local\ntask: {class: 'doll.tasks.synthetic:Gaussian'}", overrides, base_folder=folder)
    _require(isinstance(job.fleet, Ec2FleetConfig), "the settings do not name an EC2 fleet")
    fleet = ec2_fleet.connect(job)
    launched = fleet.launch(Order(slot=0, incarnation=1, market="spot"))
    _require(
        [one.id for one in fleet.instances() if one.is_alive] == [launched.id], "the launched worker is not listed"
    )
    fleet.terminate([launched.id])
    _require(not [one for one in fleet.instances() if one.is_alive], "the worker does not end")
    fleet.close()

    # 4. The stack's own machines are not the provisioner's: their tag is another.
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
        all("doll:stack" in one and "doll:cluster" not in one for one in tags),
        "a machine of the stack carries doll:cluster",
    )

    # 5. Each kind of notice goes into the queue that the provisioner reads, and the queue takes it.
    events, sqs = boto3.client("events"), boto3.client("sqs")
    about = sqs.get_queue_attributes(QueueUrl=names["notices_queue"], AttributeNames=["QueueArn", "Policy"])[
        "Attributes"
    ]
    (statement,) = json.loads(about["Policy"])["Statement"]
    may_send = set(statement["Condition"]["ArnEquals"]["aws:SourceArn"])
    kinds = set()
    for rule in events.list_rules(NamePrefix=f"doll-{NAME}-")["Rules"]:
        (target,) = events.list_targets_by_rule(Rule=rule["Name"])["Targets"]
        _require(
            target["Arn"] == about["QueueArn"] and rule["Arn"] in may_send, f"{rule['Name']} does not reach the queue"
        )
        kinds |= set(json.loads(rule["EventPattern"])["detail-type"])
    _require("EC2 Spot Instance Interruption Warning" in kinds and len(kinds) == 3, f"notices are {sorted(kinds)}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StepFailed(otherwise)


def inventory() -> dict[str, set[str]]:
    """What the account holds, by kind: what could be left behind, and cost money or be in the way."""
    import boto3

    ec2, iam = boto3.client("ec2"), boto3.client("iam")

    def listed(service: str, call: str, key: str, name: str | None) -> set[str]:
        pages = boto3.client(service).get_paginator(call).paginate()
        return {one[name] if name else one for page in pages for one in page.get(key, ())}

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
        "addresses": {one["AllocationId"] for one in ec2.describe_addresses()["Addresses"]},
        "gateways": {
            one["NatGatewayId"] for one in ec2.describe_nat_gateways()["NatGateways"] if one["State"] != "deleted"
        },
        "endpoints": {
            one["VpcEndpointId"] for one in ec2.describe_vpc_endpoints()["VpcEndpoints"] if one["State"] != "deleted"
        },
        "roles": {role["RoleName"] for role in iam.list_roles()["Roles"]},
        "profiles": {one["InstanceProfileName"] for one in iam.list_instance_profiles()["InstanceProfiles"]},
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
            for name in (one["Name"] for one in boto3.client("ssm").describe_parameters()["Parameters"])
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
        say(f"terraform {words[0]} skipped: {problem}")
        return 0
    started_s = time.monotonic()
    try:
        commands[words[0]]()
    except StepFailed as failed:
        say(str(failed))
        return 1
    say(f"terraform {words[0]}: fine, {time.monotonic() - started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
