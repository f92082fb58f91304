"""The paper's figures and tables, at tiny sizes: the scripts run, keep their files, and their quick criteria hold."""

from __future__ import annotations

import csv
import json
from importlib import import_module
from pathlib import Path

import pytest
from benchmarks.paper import harness, planning
from benchmarks.paper.__main__ import COMMAND, MARK, SCRIPTS, markdown
from benchmarks.results import update_section


@pytest.mark.slow  # simulations
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_keeps_its_files(name: str, tmp_path: Path) -> None:
    result = harness.run(name, import_module(f"benchmarks.paper.{name}").run, tmp_path, quick=True)
    assert [check.what for check in result.checks if not check.is_expected] == []
    kept = json.loads((tmp_path / f"{name}.json").read_text())
    assert kept["ok"] is True
    assert kept["quick"] is True
    assert len(kept["checks"]) == len(result.checks)
    with (tmp_path / f"{name}.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(result.rows)
    assert (tmp_path / f"{name}.png").stat().st_size > 5000
    assert f"### {result.title}" in markdown([kept])


@pytest.mark.slow  # simulations
def test_the_same_seed_gives_the_same_table(tmp_path: Path) -> None:
    runs = [harness.run("table2", import_module("benchmarks.paper.table2").run, tmp_path, quick=True) for _ in range(2)]
    assert runs[0].checks == runs[1].checks


def test_a_sweep_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracles are no rubber stamp: an answer that is off by one worker is found."""
    right = import_module("benchmarks.paper.formulas").best_num_spot
    monkeypatch.setattr(planning, "best_num_spot", lambda *args: max(0, right(*args) - 1))
    assert planning.theorem_4(200).wrong
    monkeypatch.setattr(
        planning, "unequal_cost_usd", lambda *args: -import_module("doll.theory.cost").unequal_cost_usd(*args)
    )
    assert planning.theorem_5(200).wrong


def test_the_document_keeps_what_is_around_the_marks(tmp_path: Path) -> None:
    document = tmp_path / "results.md"
    document.write_text("before\n<!-- paper: begin, written by `make paper` -->\nold\n<!-- paper: end -->\nafter\n")
    update_section(document, MARK, COMMAND, "new")
    update_section(document, MARK, COMMAND, "newer")
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "\nnewer\n" in text
    assert "old" not in text
    document.write_text("no marks")
    with pytest.raises(ValueError, match="expected the marks"):
        update_section(document, MARK, COMMAND, "new")
