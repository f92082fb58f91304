"""Words that the stack and the code share: commands, options, variables, settings, tags and exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import typer
from paths import ROOT

from .conftest import CACHE, CLIENTS, ENVIRONMENT, FILES, IMAGE, SETTINGS, Host

TERRAFORM = ROOT / "deploy" / "terraform"
MAIN = (TERRAFORM / "main.tf").read_text()
CONTROL = (TERRAFORM / "modules" / "control" / "main.tf").read_text()
SCRIPTS = {path.stem: path.read_text() for path in FILES.glob("*.sh")}


def captured(pattern: str, text: str) -> str:
    """What the pattern's group holds, where it matches."""
    match = re.search(pattern, text, re.DOTALL | re.MULTILINE)
    assert match is not None, pattern
    return match.group(1)


ROLES: list[str] = json.loads(captured(r"^  roles = (\[[^]]*\])", CONTROL))
README_COMMANDS = re.findall(r"/opt/doll/doll\.sh ([^#`\n]+)", (TERRAFORM / "README.md").read_text())


USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]  # of the click that typer brings, which has no public name


def doll_takes(words: Sequence[str]) -> None:
    """Parse a command line as `doll` would, and run nothing.

    Raises:
        UsageError: there is no such command or option, or a value does not fit.
    """
    from doll.cli.app import app

    command: Any = typer.main.get_command(app)
    context, left = None, list(words)
    while hasattr(command, "resolve_command"):
        context = command.context_class(command, parent=context, info_name=command.name)
        _, command, left = command.resolve_command(context, left)
    command.make_context(command.name, left, parent=context)


@pytest.mark.parametrize("words", ["worker --from-imdsx", "provision ran", "ps --standbye", "worker --worker x"])
def test_what_doll_does_not_take_is_seen(words: str) -> None:
    with pytest.raises(USAGE_ERROR):
        doll_takes([*words.split(), "--job", "/job/job.yaml"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("worker", ""),
        ("drain", ""),
        *(("role", role) for role in ROLES),
        *(("doll", command) for command in README_COMMANDS),
    ],
)
def test_doll_takes_what_hosts_ask_of_it(make_host: Callable[..., Host], script: str, words: str) -> None:
    host = make_host()
    if script != "worker":
        assert host.run("control")[0] == 0
    assert host.run(script, *words.split())[0] == 0
    (run,) = host.calls_of("docker run")
    asked = run.split(f" {IMAGE} ")[1].split()
    assert "--job" in asked
    assert asked.count("--set") == 2 + len(SETTINGS)
    doll_takes(asked)


def test_the_control_host_starts_the_roles_that_its_script_knows() -> None:
    assert {"ps", "evaluate", "provision"} == set(ROLES)
    known = re.findall(r"^  (\w+)\) port=(\d+)", SCRIPTS["role"], re.MULTILINE)
    assert {role for role, _ in known} - {"join"} == set(ROLES), "joiners are started by hand"
    assert len({port for _, port in known}) == len(known), "they share the host's network"
    assert len(README_COMMANDS) > 3


def test_containers_get_variables_that_the_code_reads() -> None:
    code = "".join(path.read_text() for path in (ROOT / "doll").rglob("*.py"))
    read = set(re.findall(r'"(DOLL_[A-Z_]+)"', code))
    stack = captured(r"^  authority_variables =.*?^  environment = merge\((.*?)^  \)", MAIN)
    function = captured(r"^  environment = merge\((.*?)^  \)", MAIN)
    assert set(re.findall(r"\b(DOLL_[A-Z_]+) *=", function)) <= read, "variables that only functions get"
    text = (TERRAFORM / "modules" / "secrets" / "main.tf").read_text()
    secrets = "".join(re.findall(r"<<-ENV(.*?)^  ENV", text, re.DOTALL | re.MULTILINE))
    given = set(re.findall(r"\b(DOLL_[A-Z_]+) *=", stack))
    given |= set(re.findall(r'"(DOLL_[A-Z_]+)"', captured(r"^  authority_variables = {(.*)}$", MAIN)))
    boots = {name for name in given if name.startswith("DOLL_BOOT_")}
    assert {"DOLL_KAFKA", "DOLL_KAFKA_CA", "DOLL_REDIS", "DOLL_REDIS_CA", "DOLL_REGISTRY_CA"} == given - boots
    assert set(re.findall(r"\b(DOLL_[A-Z_]+)=", secrets)) == {*CLIENTS, *CACHE}
    assert set(ENVIRONMENT) <= given, "the hosts of these tests are not those of the stack"
    own = set(re.findall(r"--env \"(DOLL_[A-Z_]+)=", SCRIPTS["common"]))
    assert own == {"DOLL_HEALTH_PORT"}
    assert (given - boots) | {*CLIENTS, *CACHE} | own <= read
    assert set(re.findall(r"\$\(setting (\w+)\)", "".join(SCRIPTS.values()))) == boots


@pytest.mark.parametrize("path", ["main.tf", "modules/control/main.tf", "modules/kafka/main.tf"])
def test_scripts_find_what_they_read_in_boot_env(path: str) -> None:
    boot = captured(r"^module \"(?:worker_)?boot\" {(.*?)^}", (TERRAFORM / path).read_text())
    given = set(re.findall(r"^    ([A-Z_]+) *=", captured(r"environment = {(.*?)^  }", boot), re.MULTILINE))
    scripts = json.loads(captured(r"scripts *= (\[[^]]*\])", boot))
    # What is read with a default is for tests.
    text = re.sub(r"\$\{\w+:-[^}]*\}", "", "".join(SCRIPTS[name] for name in ("common", *scripts)))
    read = set(re.findall(r"(?:\$\{?|\$\(\(|< )((?:AWS|DOLL)_\w+)", text))
    assert read == given


def test_the_settings_are_those_of_the_stack_and_doll_takes_them() -> None:
    """A list among the settings is JSON, which is YAML."""
    from doll.config import Ec2FleetConfig, LambdaFleetConfig, parse

    def names(pattern: str) -> set[str]:
        return set(re.findall(r'^    "([a-z_.]+)" *=', captured(pattern, MAIN), re.MULTILINE))

    of_all = names(r"^  settings = merge\(local.fleet, {(.*?)^  }")
    assert of_all | names(r"^  fleet = [^{]*{(.*?)^    }\)") == set(SETTINGS)
    key = captured(r"--set \"([a-z.]+)=s3://", SCRIPTS["common"])
    given = [*(f"{name}={value}" for name, value in SETTINGS.items()), f"{key}=s3://bucket/checkpoints/t"]
    job = parse("job: t\ntask: {class: 'a:B'}", given)
    assert job.kafka.security == "sasl_ssl"
    assert isinstance(job.fleet, Ec2FleetConfig)
    assert list(job.fleet.subnets) == json.loads(SETTINGS["fleet.subnets"])
    of_functions = {*of_all, *names(r"^    }\) : tomap\({(.*?)^  }\)")}
    assert {n[6:] for n in of_functions if n.startswith("fleet.")} <= set(LambdaFleetConfig.model_fields)


def test_a_worker_finds_the_tags_that_the_provisioner_gives_it() -> None:
    from doll.consumers.lifecycle import spot_notices
    from doll.provisioner.fleets.ec2 import tags

    given = {tags.TAGS.worker, tags.TAGS.incarnation, tags.TAGS.market}
    assert set(spot_notices._FROM_TAGS.values()) == given
    # With other characters, a launch fails where instances show their tags.
    assert all(re.fullmatch(r"[A-Za-z0-9+=.,_:@-]+", tag) for tag in (*given, tags.TAGS.cluster))
    template = (TERRAFORM / "modules" / "workers" / "main.tf").read_text()
    assert re.search(r'instance_metadata_tags += "enabled"', template)
    assert f"tag:{tags.TAGS.cluster}," in SCRIPTS["heartbeat"]
    assert captured(r'cluster_tag = "([^"]+)"', (TERRAFORM / "iam.tf").read_text()) == tags.TAGS.cluster


def test_exit_codes_that_another_try_does_not_change() -> None:
    from doll.errors import ConfigError, DollError, InfeasiblePlanError, ServiceUnavailableError

    final = {ConfigError.exit_code, InfeasiblePlanError.exit_code}
    unit = (FILES / "doll-role@.service").read_text()
    assert set(map(int, captured(r"^RestartPreventExitStatus=(.*?)$", unit).split())) == final
    assert set(map(int, re.findall(r"\$1 == (\d)", captured(r"^final\(\) {(.*?)}$", SCRIPTS["worker"])))) == final | {0}
    assert not final & {DollError.exit_code, ServiceUnavailableError.exit_code}
