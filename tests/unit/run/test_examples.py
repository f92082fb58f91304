"""The examples that ship: by name from any folder, copied with what they need, named right in every help and page."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import yaml
from commands import doll
from doll.run import examples
from paths import ROOT

NAMES = [
    "characters",
    "clicks",
    "clicks_avro",
    "delayed_clicks",
    "digits",
    "emnist",
    "factors",
    "intrusion",
    "lda",
    "lora",
    "market",
    "pipeline",
    "ranker",
    "ratings",
    "stdin",
    "synthetic",
    "trips",
    "trunk",
    "words",
]


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a folder with nothing in it."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_every_example_is_listed_with_what_runs_it() -> None:
    listed = json.loads(doll("example", "list", "--json").stdout)
    assert [example["name"] for example in listed] == NAMES
    assert [example["command"] for example in listed] == [
        "doll up characters", "doll up clicks", "doll up clicks_avro", "doll up delayed_clicks", "doll up digits",
        "doll up emnist", "doll up factors", "doll up intrusion", "doll up lda", "doll up lora", "doll spot market",
        "doll up pipeline", "doll up ranker", "doll up ratings", "doll up stdin", "doll up synthetic", "doll up trips",
        "doll up trunk", "doll up words",
    ]  # fmt: skip
    text = doll("example", "list").stdout
    assert all(f"{example['command']} " in text and example["description"] in text for example in listed)


@pytest.mark.parametrize(
    "arguments",
    [["digits"], ["--job", "digits"], ["market"], pytest.param(["stdin", "--build-model"], marks=pytest.mark.slow)],
)
def test_a_name_stands_for_its_job_file_in_an_empty_folder(arguments: list[str], empty: Path) -> None:
    result = doll("config", "check", *arguments)
    assert (result.exit_code, list(empty.iterdir())) == (0, []), result.output
    assert ": valid." in result.stdout


def test_a_name_in_the_environment_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOLL_JOB", "digits")
    assert doll("config", "check").stdout.startswith("digits: valid.")


def test_what_is_there_under_the_name_counts_more_than_an_example(empty: Path) -> None:
    (empty / "digits").write_text("job: mine\ntask: {class: 'examples.digits.task:Digits'}\n")
    assert doll("config", "check", "digits").stdout.startswith("mine: valid.")
    (empty / "market").mkdir()
    assert doll("config", "check", "market").stdout.startswith("market: valid."), "a folder that is no run"
    (empty / "market" / "job.yaml").write_text("job: ran\ntask: {class: 'examples.digits.task:Digits'}\n")
    assert doll("config", "check", "market").stdout.startswith("ran: valid.")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("digitz", "did you mean the example 'digits'?"),
        ("spot", "the example is called market now: doll spot market"),
        ("topics", "the example is called lda now: doll up lda"),
        ("examples/spot.yaml", "the example is called market now: doll spot market"),
        ("examples/digits.yaml", "ships with DOLL: use digits in place of the path"),
        ("examples/digits/job.yaml", "ships with DOLL: use digits in place of the path"),
        ("digits.yaml", "ships with DOLL: use digits in place of the path"),
        ("zzz", "doll example list names those that ship with DOLL"),
    ],
)
def test_a_job_file_that_is_not_there_leads_to_the_example(name: str, expected: str) -> None:
    result = doll("up", name)
    assert result.exit_code == 2
    assert f"cannot read job file {name}: No such file or directory; " in result.stderr
    assert expected in result.stderr


def test_no_example_has_the_name_of_a_command() -> None:
    """`doll spot spot` and `doll up topics` beside `doll topics` were easy to confuse."""
    commands = doll("--help").stdout
    named = set(re.findall(r"^  ([a-z]+)  +[A-Z]", commands, re.MULTILINE))
    assert named >= {"up", "spot", "topics"}
    assert not named & {example["name"] for example in json.loads(doll("example", "list", "--json").stdout)}


def test_an_example_whose_data_does_not_ship_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a wheel, beside which no data lies."""
    at = tmp_path / "site" / "doll" / "examples"
    shutil.copytree(ROOT / "examples", at, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(examples, "__file__", str(at.parent / "cli" / "examples.py"))
    listed = json.loads(doll("example", "list", "--json").stdout)
    lacking = {example["name"] for example in listed if example["lacks_data"]}
    assert lacking == {"emnist", "intrusion", "lda", "ratings", "words"}
    result = doll("up", "intrusion")
    assert result.exit_code == 2
    assert "source.path: expected a file, but " in result.stderr
    assert "doll example copy NAME FOLDER, and set these keys in it" in result.stderr


def test_no_job_at_all_names_one_that_everybody_has() -> None:
    assert "as in: doll up digits" in doll("up").stderr


DIGITS = ["README.md", "digits.npz", "notebook.ipynb", "pipeline.yaml", "task.py"]


@pytest.mark.slow  # loads torch, with the task
@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("digits", ["job.yaml", *DIGITS[:2], "market.yaml", *DIGITS[2:]]),
        ("market", ["market.yaml", *DIGITS[:2], "job.yaml", *DIGITS[2:]]),
        ("stdin", ["job.yaml", "README.md", "task.py"]),
    ],
)
def test_a_copy_has_all_that_it_needs_and_overwrites_nothing(name: str, files: list[str], empty: Path) -> None:
    result = doll("example", "copy", name, "mine/new")
    assert result.stdout.splitlines() == [f"mine/new/{file}" for file in files]
    assert sorted(path.name for path in (empty / "mine" / "new").iterdir()) == sorted(files)
    assert doll("config", "check", f"mine/new/{files[0]}", "--build-model").exit_code == 0
    again = doll("example", "copy", name, "mine/new")
    assert again.exit_code == 2
    assert f"mine/new/{files[0]}" in again.stderr
    assert "files are not overwritten" in again.stderr
    folder = "stdin" if name == "stdin" else "digits"
    here = doll("example", "copy", name)
    assert here.stdout.splitlines() == [f"{folder}/{file}" for file in files]
    job = empty / folder / "job.yaml"
    job.write_text(re.sub("^job: .*$", "job: my-own", job.read_text(), flags=re.MULTILINE))
    assert json.loads(doll("config", "show", folder, "--json").stdout)["job"] == "my-own"  # not the shipped one


def test_a_copy_that_cannot_be_made_says_why(empty: Path) -> None:
    (empty / "file").write_text("")
    for name, to, expected in (
        ("nothing", ".", "one of characters, clicks, clicks_avro, delayed_clicks, digits"),
        ("digits", "file/inner", "cannot write to file/inner"),
    ):
        result = doll("example", "copy", name, to)
        assert result.exit_code == 2
        assert expected in result.stderr


# --- help and pages -------------------------------------------------------------------------------------------------

_COMMAND = re.compile(r"\bdoll (?:up|drill|spot|plan|simulate|evaluate|audit|config check|config show) +([\w./-]+)")


def test_help_and_errors_name_no_file_that_only_a_clone_has() -> None:
    for path in sorted((ROOT / "doll").rglob("*.py")):
        assert "examples/" not in path.read_text().replace('"examples"', ""), path


def test_every_example_that_a_page_runs_is_there() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*/*.[my]*"))]
    named = set()
    for page in pages:
        if page.is_file():
            for word in _COMMAND.findall(page.read_text()):
                assert not word.startswith("examples/"), f"{page}: {word}"
                named |= {word} & set(NAMES)
    assert named >= {"digits", "market", "stdin"}


def test_the_wheel_holds_the_examples_and_finds_them_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As built, without installing it: what `python -m build --wheel` runs."""
    monkeypatch.chdir(ROOT)
    from hatchling.builders.wheel import WheelBuilder

    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(built) as wheel:
        names = set(wheel.namelist())
        shipped = (ROOT / "examples").glob("*/*.*")
        assert {f"doll/examples/{path.parent.name}/{path.name}" for path in shipped} | {
            "doll/examples/gpus.yaml"
        } <= names
        assert not [name for name in names if name.endswith(".pyc")]
        wheel.extractall(tmp_path / "site")
    monkeypatch.setattr(examples, "__file__", str(tmp_path / "site" / "doll" / "run" / "examples.py"))
    assert examples.folder() == tmp_path / "site" / "doll" / "examples"
    installed = {example.name: example for example in examples.examples()}
    assert list(installed) == NAMES
    for name, example in installed.items():
        job, *beside = example.files
        assert {"README.md", "task.py"} <= {file.name for file in beside}, name
        assert job.is_relative_to(tmp_path / "site")
        assert yaml.safe_load(job.read_text())["job"]
