"""Which versions `doll serve` is told to answer with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer
from doll.cli.serve import _has_ended, _wanted
from doll.run.target import open_target
from doll.services import Services
from job_files import job


@pytest.mark.parametrize(
    ("version", "split", "wanted"),
    [
        (None, None, {"latest": 100}),
        ("stable", None, {"stable": 100}),
        ("007", None, {"7": 100}),
        (None, "stable=95,latest=5", {"stable": 95, "latest": 5}),
        (None, " stable=50% , 12=50%", {"stable": 50, "12": 50}),
    ],
)
def test_versions_and_their_shares(version: str | None, split: str | None, wanted: dict[str, float]) -> None:
    assert _wanted(version, split) == wanted


@pytest.mark.parametrize("split", ["stable", "stable=x", "stable=50", "a=0,b=100", "a=50,a=50", "=100", "a=60,b=60"])
def test_shares_that_are_none_are_refused(split: str) -> None:
    with pytest.raises(typer.BadParameter, match="--split"):
        _wanted(None, split)


def test_one_of_both() -> None:
    with pytest.raises(typer.BadParameter, match="got both"):
        _wanted("stable", "latest=100")


def test_a_run_has_ended_while_its_report_is_newer_than_its_services(tmp_path: Path) -> None:
    target = open_target(_run(tmp_path), [])
    assert not _has_ended(target)
    target.run.report.write_text("{}")
    os.utime(target.run.stack, (100, 100))
    os.utime(target.run.report, (200, 200))
    assert _has_ended(target)
    os.utime(target.run.stack, (300, 300))  # it was resumed
    assert not _has_ended(target)


def _run(folder: Path) -> Path:
    from doll.run.folder import RunFolder

    run = RunFolder(folder)
    run.write_job(job(folder=folder))
    run.write_stack(Services("127.0.0.1:1", "redis://127.0.0.1:1/0"))
    return folder
