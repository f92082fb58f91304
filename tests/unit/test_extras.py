"""Packages that only some commands and jobs need: without them these are refused before they start, others go on."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from doll import extras
from doll.cli.app import app
from doll.errors import ConfigError
from doll.run.local.preflight import check_files
from job_files import job
from packaging.requirements import Requirement
from paths import ROOT
from typer.testing import CliRunner

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OF_ALL = {"avro", "drift", "join", "local", "otel", "plots", "protobuf", "provision", "serve"}


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """An install without extras, for whoever looks before it imports."""
    find_spec = importlib.util.find_spec
    lacks = {module for modules in extras._MODULES.values() for module in modules}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in lacks else find_spec(name))


def test_all_is_every_extra_of_a_command() -> None:
    (all_of_them,) = map(Requirement, EXTRAS["all"])
    assert all_of_them.extras == OF_ALL
    assert extras._MODULES.keys() <= EXTRAS.keys()


@pytest.mark.parametrize(
    ("command", "what", "extra"),
    [("serve digits", "doll serve", "serve"), ("dashboard digits", "doll dashboard", "serve")],
)
@pytest.mark.usefixtures("light")
def test_a_command_without_its_extra_is_refused_in_one_line(command: str, what: str, extra: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 2
    assert result.stderr == f"doll: {what} needs the extra {extra}: pip install 'doll-online[{extra}]'\n"


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("{kind: avro, registry: 'http://127.0.0.1:1'}", "avro"),
        ("{kind: protobuf, message: 'a_pb2:Click'}", "protobuf"),
    ],
)
@pytest.mark.usefixtures("light")
def test_a_job_whose_format_cannot_be_decoded_is_refused_before_it_starts(form: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"data.format.kind: {kind} needs the extra {kind}: pip install")):
        check_files(job(text=f"data: {{format: {form}}}"))


_WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import doll.cli.app, doll.run.local.up, doll.run.local.roles, doll.run.local.compare, doll.dashboard.saved_page
import doll.ps.main, doll.consumers.faust_app, doll.evaluation.main, doll.producers.main
"""


@pytest.mark.slow
def test_a_job_of_json_records_runs_without_extras(tmp_path: Path) -> None:
    """Every module of the roles of `doll up` is imported where none of these packages is installed."""
    names = {"fastavro", "google", "rocksdict", "scipy", "matplotlib", "starlette", "uvicorn", "httptools"}
    code = _WITHOUT.replace("{names}", repr(names))
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
