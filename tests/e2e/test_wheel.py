"""DOLL as a user of pip has it: the wheel in a new environment, an empty folder, no checkout."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import nbformat
import pytest
from distributions import environment_with_wheel
from paths import EXAMPLES, ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("broker")]  # `broker` skips where none can be started


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a shell in which the environment is active."""
    programs = environment_with_wheel(ROOT, tmp_path_factory.mktemp("wheel") / "environment")
    hidden = ("PYTHONPATH", "DOLL_", "VIRTUAL_ENV", "PYTEST_", "MPLBACKEND")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return inherited | {"PATH": f"{programs}:{inherited['PATH']}"}


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def run(environment: Mapping[str, str], folder: Path, *command: str) -> str:
    """Its standard output; it ends with exit code 0."""
    completed = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def test_from_an_empty_folder_two_commands_lead_to_an_audited_run(environment: dict[str, str], empty: Path) -> None:
    """The command before these two is pip's."""
    assert str(ROOT) not in run(environment, empty, "python", "-c", "import doll; print(doll.__file__)")
    run(environment, empty, "doll", "example", "copy", "digits")
    assert sorted(path.name for path in (empty / "digits").iterdir()) == sorted(
        path.name for path in (EXAMPLES / "digits").iterdir() if path.name != "__pycache__"
    )
    report = json.loads(run(environment, empty, "doll", "up", "digits", "--set", "stop.samples=3000", "--json"))
    (folder,) = (empty / "runs").iterdir()
    assert report["audit"]["ok"]
    assert report["audit"]["applied"] >= 3000
    log = (folder / "logs" / "up.log").read_text()
    assert str(ROOT) not in log


_EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=600).execute()
nbformat.write(notebook, "executed.ipynb")
"""


def test_the_notebook_of_the_examples_runs_from_top_to_bottom(environment: dict[str, str], empty: Path) -> None:
    run(environment, empty, "python", "-c", _EXECUTE, str(EXAMPLES / "digits" / "notebook.ipynb"))
    notebook = nbformat.read(empty / "executed.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    panels = [output for output in cells[3].outputs if output.output_type == "display_data"]
    assert len(panels) == 1  # one panel, however long the run is
    assert "<pre" in panels[0].data["text/html"]
    assert any("image/png" in output.data for output in cells[4].outputs if "data" in output)
    assert "'ok': True" in cells[5].outputs[0].data["text/plain"]
    accuracy = float(cells[6].outputs[0].text.split()[2])
    assert accuracy > 0.85
