"""Runs side by side, from the folder of `doll compare` or any other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from doll.dashboard.runs_folder import RunsFolder, is_runs_folder
from doll.monitor.views.page import page
from doll.process.files import write_json
from page_feed import MadeUpJob, ask, leave_run, served


def run_of(seconds: int, seed: int) -> MadeUpJob:
    made_up = MadeUpJob(4, members=4, seed=seed)
    made_up.run(seconds)
    return made_up


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A comparison of two policies of three, of which the second runs."""
    leave_run(run_of(20, 1), tmp_path / "clicks-1-bsp-1")
    leave_run(run_of(10, 2), tmp_path / "clicks-2-asp-1")
    (tmp_path / "clicks-2-asp-1" / "report.json").unlink()
    for at, name in enumerate(("clicks-1-bsp-1", "clicks-2-asp-1")):
        os.utime(tmp_path / name / "job.yaml", (at, at))
    plain = {
        "job": "clicks", "target_loss": 1.5, "target_given": True, "not_run": ["asp", "ssp"], "notes": ["a note"],
        "policies": [{"policy": "bsp", "folder": str(tmp_path / "clicks-1-bsp-1")}],
    }  # fmt: skip
    write_json(tmp_path / "comparison.json", plain)
    return tmp_path


def shown(folder: Path) -> dict[str, Any]:
    return RunsFolder(folder).page()


def test_a_comparison_shows_what_has_run_what_runs_and_what_is_to_come(folder: Path) -> None:
    page_ = shown(folder)
    assert (page_["job"], page_["target"], page_["notes"]) == ("clicks", 1.5, ["a note"])
    assert [run["label"] for run in page_["runs"].values()] == ["bsp", "asp"]
    assert page_["missing"] == ["ssp"]
    done, running = page_["runs"].values()
    assert page_["columns"][:4] == ["policy", "step", "time to loss", "samples to loss"]
    assert done["cells"][0] == "bsp"
    assert done["cells"][-1] == "samples: 30720 reached"
    assert (running["tone"], running["cells"][-1]) == ("none", "no report yet")
    losses = page_["curves"]["clicks-1-bsp-1"]["seconds"]
    assert len(losses) == 20
    assert page_["kind"] == "held-out"


def test_what_has_not_changed_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = RunsFolder(folder)
    first = runs.comparison().runs
    assert [one is other for one, other in zip(first, runs.comparison().runs, strict=True)] == [True, True]
    leave_run(run_of(12, 2), folder / "clicks-2-asp-1")
    assert [one is other for one, other in zip(first, runs.comparison().runs, strict=True)] == [True, False]


def test_runs_of_one_folder_need_no_comparison(folder: Path) -> None:
    (folder / "comparison.json").unlink()
    assert is_runs_folder(folder)
    assert not is_runs_folder(folder / "clicks-1-bsp-1")
    assert not is_runs_folder(folder / "nothing")
    assert [run["label"] for run in shown(folder)["runs"].values()] == ["clicks-1-bsp-1", "clicks-2-asp-1"]


def test_a_folder_that_cannot_be_compared_says_why(folder: Path) -> None:
    write_json(folder / "comparison.json", {"policies": [{"policy": 3}]})
    assert "expected a comparison of this release" in shown(folder)["notes"][0]
    assert shown(folder)["runs"] == {}


def test_a_run_that_cannot_be_read_does_not_hide_the_others(folder: Path) -> None:
    (folder / "clicks-1-bsp-1" / "job.yaml").write_text("job: [")
    assert {name: run["tone"] for name, run in shown(folder)["runs"].items()} == {
        "clicks-1-bsp-1": "bad",
        "clicks-2-asp-1": "none",
    }


def test_a_run_opens_once_it_has_ended(folder: Path) -> None:
    runs = RunsFolder(folder)
    opened = runs.opened("clicks-1-bsp-1")
    assert opened is not None
    assert opened.read(page)["job"]["name"] == "clicks"
    for name in ("clicks-2-asp-1", "nothing", "..", ""):
        assert runs.opened(name) is None


def test_the_server_has_a_page_for_each_run(folder: Path) -> None:
    with served(RunsFolder(folder)) as port:
        assert b"Runs side by side" in ask(port, "/")[2]
        assert b"Is it learning?" in ask(port, "/runs/clicks-1-bsp-1/")[2]
        assert ask(port, "/runs/clicks-1-bsp-1/page.js")[0] == 200
        status, _, body = ask(port, "/runs/clicks-1-bsp-1/api/update/80")
        assert (status, json.loads(body)["title"]) == (200, "Update 80")
        for path in ("/runs/clicks-2-asp-1/", "/runs/..%2f..%2fetc/", "/runs/nothing/events", "/api/update/80"):
            assert ask(port, path)[0] == 404, path
