"""The commands: forms of their arguments, exit codes, clean messages, quick answers."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import deploy_scripts
import pytest
import structlog
from commands import doll
from doll.cli import main
from doll.cli.app import app
from doll.cli.output import emit
from doll.config import JobConfig, load
from paths import DOCS
from typer.testing import CliRunner

COMMANDS = ["up", "produce", "worker", "ps", "evaluate", "audit", "topics", "status", "export", "compare", "config"]
NOWHERE = ["--set", "kafka.address=127.0.0.1:1", "--set", "redis.address=redis://127.0.0.1:1/0"]
JOB = """
job: line
task: {class: 'my_task.py:MyTask'}
data: {workers: 2, batch_size: 8}
source: {kind: python, of: examples.synthetic.source:gaussians}
training: {policy: {name: doll, group_size: 2}}
stop: {updates: 3}
"""


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command sets up logging to its own standard error, which is closed when the test is over."""
    handlers = list(logging.getLogger().handlers)
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = handlers


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "my_task.py").write_text("import torch\nfrom doll import Task\n\n\nclass MyTask(Task):\n    pass\n")
    path = tmp_path / "my.yaml"
    path.write_text(JOB)
    return path


def test_help_names_every_command_and_each_has_an_example() -> None:
    text = doll("--help").output
    assert "Exit codes: 0 done, 1 failed, 2 wrong usage or job file, 3 infeasible plan" in text
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", text, re.MULTILINE), command
    for command in [*(name for name in COMMANDS if name != "config"), "config show", "config check"]:
        result = doll(*command.split(), "--help")
        assert result.exit_code == 0
        assert f"Example: {'cat events.jsonl | ' if command == 'produce' else ''}doll {command}" in result.output


def test_help_shows_commands_in_groups() -> None:
    lines = doll("--help").stdout.splitlines()
    groups: dict[str, set[str]] = {}
    for line in lines[lines.index("Options:") :]:
        if line and not line.startswith(" "):
            group = groups.setdefault(line.rstrip(":"), set())
        elif line.strip():
            group.add(line.split()[0])
    del groups["Options"]
    assert list(groups) == [
        "Start here", "Look", "Roles: each command runs one process of a job", "Money and machines",
        "Examine and repair",
    ]  # fmt: skip
    assert set().union(*groups.values()) >= set(COMMANDS)
    assert {"up", "example"} < groups["Start here"]
    assert {"plan", "spot"} < groups["Money and machines"]


def test_the_former_name_of_an_option_leads_to_its_name() -> None:
    result = doll("up", "digits", "--runs-folder", "here")
    assert result.exit_code == 2
    assert "--parent-folder" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["config", "check", "{job}"], ["up", "--help"]])
def test_help_and_checks_answer_at_once(job: Path, arguments: list[str]) -> None:
    """Well below a second of processor time; fifteen here, since test machines are slow and shared."""
    command = [sys.executable, "-m", "doll", *(word.format(job=job) for word in arguments)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 15.0


@pytest.mark.slow
def test_no_command_line_module_loads_torch(job: Path) -> None:
    """Torch costs 5 s of processor time: neither help nor a check nor the modules behind `up` may import it."""
    code = (
        "import sys\nimport doll.cli.app, doll.run.local.up, doll.run.status, doll.run.local.roles\n"
        "import doll.monitor.views.run_report\n"
        "from typer.testing import CliRunner\n"
        f"assert CliRunner().invoke(doll.cli.app.app, ['config', 'check', {str(job)!r}]).exit_code == 0\n"
        "heavy = {'torch', 'matplotlib', 'faust', 'sklearn', 'scipy'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


def test_help_loads_no_library_but_typer() -> None:
    """`doll --help` and completion answer at once: each of these libraries costs a tenth of a second or more."""
    code = (
        "import sys\nimport doll.cli.app\nfrom typer.testing import CliRunner\n"
        "assert CliRunner().invoke(doll.cli.app.app, ['--help']).exit_code == 0\n"
        "heavy = {'confluent_kafka', 'numpy', 'pydantic', 'rich', 'structlog', 'yaml'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


def test_version() -> None:
    import doll as package

    assert doll("--version").output == f"doll {package.__version__}\n"


def test_both_forms_name_the_job(job: Path) -> None:
    assert doll("config", "show", job).output == doll("config", "show", "--job", job).output
    assert doll("config", "show", job, "--job", job).exit_code == 0
    both = doll("config", "show", job, "--job", "other.yaml")
    assert both.exit_code == 2
    assert "expected one job" in both.stderr
    none = doll("up")
    assert none.exit_code == 2
    assert "expected a job file" in none.stderr


def test_config_show_prints_what_loads_again(job: Path, tmp_path: Path) -> None:
    shown = doll("config", "show", job, "--set", "data.workers=3")
    again = tmp_path / "again.yaml"
    again.write_text(shown.stdout)
    assert load(again) == load(job, ["data.workers=3"])
    content = json.loads(doll("config", "show", job, "--json").stdout)
    assert content["data"]["workers"] == 2
    assert content["task"]["class"] == "my_task.py:MyTask"


def test_a_good_job_file_is_fine(job: Path) -> None:
    result = doll("config", "check", job)
    assert result.exit_code == 0
    assert result.stdout == "line: valid. 2 workers, batches of 8, 2 batches per update\n"
    assert json.loads(doll("config", "check", job, "--json").stdout)["group_size"] == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.worker=3"], r"data\.worker: unknown key \(did you mean 'workers'\?\)"),
        (["data.workers=none"], r"data\.workers: .*, got 'none'"),
        (["task.class=my_task.py:MyTusk"], r"has no class 'MyTusk' \(did you mean 'MyTask'\?\)"),
        (["task.class=gone.py:MyTask"], r"expected a Python file, but .*gone\.py does not exist"),
        (["task.class=no_such_module:MyTask"], r"no module 'no_such_module'"),
        (["task.class=no_such.module:MyTask"], r"cannot import 'no_such\.module'"),
        (["task.class=doll.tasks.digits:Digits"], r"the tasks that ship are examples now: doll example list"),
        (["source={kind: csv, path: gone.csv}"], r"source\.path: expected a file, but .*gone\.csv does not exist"),
        (["no-equals-sign"], r"--set: expected key\.sub=value, got 'no-equals-sign'"),
    ],
)
def test_a_wrong_job_file_is_told_apart_and_exits_2(job: Path, overrides: list[str], message: str) -> None:
    result = doll("config", "check", job, *(word for item in overrides for word in ("--set", item)))
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr
    assert result.stderr.startswith("doll: ")
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("!!bool x", "expected a value of tag:yaml.org,2002:bool, got 'x'"),
        ("!!int ''", "expected a value of tag:yaml.org,2002:int, got ''"),
        ("!!timestamp x", "could not determine a constructor for the tag 'tag:yaml.org,2002:timestamp'"),
        ("!!binary x", "could not determine a constructor"),
    ],
)
def test_a_yaml_tag_in_a_job_file_is_no_traceback(job: Path, value: str, expected: str) -> None:
    text = job.read_text() + f"seed: {value}\n"
    job.write_text(text)
    for result in (doll("config", "check", job), doll("up", job)):
        assert result.exit_code == 2, result.exception
        assert f"doll: {job}: not YAML: " in result.stderr
        assert expected in result.stderr
        assert isinstance(result.exception, SystemExit)


@pytest.mark.slow
def test_every_command_refuses_a_missing_job_file() -> None:
    for command in COMMANDS:
        words = ["config", "check"] if command == "config" else [command]
        result = doll(*words, "no-such.yaml")
        assert result.exit_code == 2, command
        assert "cannot read job file no-such.yaml" in result.stderr, command


def test_debug_shows_the_traceback(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOLL_DEBUG", "1")
    result = doll("config", "check", job, "--set", "data.workers=0")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


@pytest.mark.slow
def test_services_that_are_not_there_are_named(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from doll import service_checks
    from doll.kafka.clients import kafka_problem

    monkeypatch.setattr(
        service_checks, "kafka_problem", lambda config, services, timeout_s: kafka_problem(config, services, 0.5)
    )
    for command in ("ps", "evaluate", "status", "produce", "audit"):
        result = CliRunner().invoke(app, [command, str(job), *NOWHERE])
        assert result.exit_code == 1, (command, result.output)
        assert "127.0.0.1:1" in result.stderr, command
        assert "Traceback" not in result.stderr, command


def test_without_an_address_the_message_says_how_to_give_one(job: Path) -> None:
    result = doll("ps", job)
    assert result.exit_code == 2
    assert "DOLL_KAFKA=host:port" in result.stderr


def test_a_worker_number_outside_the_job_is_refused(job: Path) -> None:
    result = doll("worker", job, "--worker", "2")
    assert result.exit_code == 2
    assert re.search(r"expected 0 .. 1 \(data.max_workers\), got 2", result.stderr)


def test_produce_without_a_source_says_what_to_do(job: Path) -> None:
    result = doll("produce", "--job", job, "--set", "source=null")
    assert result.exit_code == 2
    assert "--stdin" in result.stderr


@pytest.mark.slow
def test_up_reads_no_terminal(job: Path) -> None:
    master, terminal = os.openpty()
    try:
        command = [sys.executable, "-m", "doll", "up", str(job), "--set", "source={kind: stdin}"]
        result = subprocess.run(command, stdin=terminal, capture_output=True, text=True, timeout=300, check=False)
    finally:
        os.close(master)
        os.close(terminal)
    assert result.returncode == 2
    assert "expected a pipe, got a terminal" in result.stderr


def test_an_interrupt_is_no_traceback(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from doll.run.local import preflight

    def interrupted(config: JobConfig) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(preflight, "check_files", interrupted)
    result = doll("config", "check", job)
    assert (result.exit_code, result.stderr) == (1, "doll: interrupted\n")


def test_up_checks_the_task_before_it_starts_anything(job: Path, tmp_path: Path) -> None:
    result = doll("up", job, "--set", "task.class=my_task.py:Nobody", "--parent-folder", tmp_path / "runs")
    assert result.exit_code == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow  # the devices are torch's
def test_up_checks_the_devices_of_stages_before_it_starts_anything(tmp_path: Path) -> None:
    devices = "worker.pipeline.devices=[cpu, 'cuda:99', cpu]"
    result = doll("up", "pipeline", "--set", devices, "--parent-folder", tmp_path / "runs")
    assert result.exit_code == 2
    assert "worker.pipeline.devices: worker 0, stage 2: device cuda:99: expected cpu, or one of" in result.stderr
    assert not (tmp_path / "runs").exists()
    assert doll("config", "check", "pipeline", "--build-model", "--set", devices).exit_code == 0  # for other machines


@pytest.mark.slow
def test_export_without_a_checkpoint_says_so(job: Path, tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(
        "import torch\nfrom doll import Task\n\n\nclass MyTask(Task):\n"
        "    def build_model(self):\n        return torch.nn.Linear(2, 1)\n"
    )
    result = doll("export", job, "--run-folder", tmp_path / "run")
    assert result.exit_code == 1
    assert "no checkpoint in" in result.stderr


def test_the_configuration_page_is_up_to_date() -> None:
    page, markdown = DOCS / "configuration.md", deploy_scripts.load("config_reference").markdown
    assert page.read_text(encoding="utf-8") == markdown(), (
        "run: python deploy/config_reference.py docs/configuration.md"
    )


def test_the_configuration_page_names_every_key() -> None:
    text = deploy_scripts.load("config_reference").markdown()
    for name, field in JobConfig.model_fields.items():
        if name != "base_folder":
            assert f"| `{field.alias or name}` |" in text
    assert "| `rate_per_s` | number > 0 or list of number > 0 | `125.0` |" in text


@pytest.mark.parametrize("encoding", ["iso-8859-1", "ascii", "utf-8"])
def test_a_terminal_of_few_letters_gets_escapes(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """The λ of a report ended a successful run with exit code 1."""
    content, out = {"name": "Łódź λ 😀"}, io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    monkeypatch.setattr("doll.cli.app.app", lambda: (emit(True, content, ""), emit(False, content, "Nλ/(Kb)")))
    main()
    *lines, text = out.getvalue().decode(encoding).splitlines()
    assert json.loads("\n".join(lines)) == content
    assert text == ("Nλ/(Kb)" if encoding == "utf-8" else r"N\u03bb/(Kb)")


@pytest.mark.parametrize(("final", "expected"), [(None, 2), ("", 2), ("0", 0)])
def test_a_supervisor_that_repeats_failures_is_told_that_a_restart_cannot_help(
    tmp_path: Path, final: str | None, expected: int
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "DOLL_FINAL_EXIT_CODE"}
    if final is not None:
        environment["DOLL_FINAL_EXIT_CODE"] = final
    command = [sys.executable, "-m", "doll", "worker", str(tmp_path / "none.yaml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == expected
    assert "cannot read job file" in done.stderr
    assert ("a restart cannot help" in done.stderr) == (expected == 0)


@pytest.mark.parametrize(("stopped", "signalled", "expected"), [("143", True, 143), ("143", False, 0), (None, True, 0)])
def test_a_job_of_kubernetes_is_told_a_stop_from_an_end(stopped: str | None, signalled: bool, expected: int) -> None:
    """A Job replaces a pod that was evicted, and not one that exits with 0."""
    script = f"""
import os, signal, sys
import doll.cli, doll.cli.app
from doll.process.signals import stop_requested
def role():
    with stop_requested() as stop:
        if {signalled}:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.wait(60)
    sys.exit(0)
doll.cli.app.app = role
doll.cli.main()
"""
    environment = {key: value for key, value in os.environ.items() if key != "DOLL_STOPPED_EXIT_CODE"}
    if stopped is not None:
        environment["DOLL_STOPPED_EXIT_CODE"] = stopped
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == expected
