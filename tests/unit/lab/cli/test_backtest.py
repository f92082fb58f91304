"""`doll backtest`: what it prints and writes, recordings that it skips, and wrong flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doll.cli.app import app
from flicker import flicker
from typer.testing import CliRunner

from doll_lab.backtests.adaptive import backtest_policies
from doll_lab.traces.export import write_folder


@pytest.mark.slow  # backtests
def test_doll_backtest_takes_any_folder_in_the_documented_form(tmp_path: Path) -> None:
    write_folder([flicker(5, hours=60.0)], tmp_path / "mine")
    arguments = ["backtest", str(tmp_path / "mine"), "--workers", "4", "--windows", "3", "--deadline-ratio", "1.2",
                 "--processes", "1", "--out", str(tmp_path / "out")]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "flicker, deadline 1.2 x, 3 jobs" in result.stdout
    assert "adaptive: met every deadline" in result.stdout
    content = json.loads((tmp_path / "out" / "backtest.json").read_text())
    assert {row["policy"] for row in content["rows"]} == {made.name for made in backtest_policies()}
    assert (tmp_path / "out" / "backtest.png").stat().st_size > 5000
    assert len((tmp_path / "out" / "backtest.csv").read_text().splitlines()) == 1 + len(backtest_policies())
    as_json = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(as_json.stdout)["rows"] == content["rows"]


def test_doll_backtest_exports_what_it_reads(tmp_path: Path) -> None:
    write_folder([flicker(5, hours=60.0)], tmp_path / "mine")
    result = CliRunner().invoke(app, ["backtest", str(tmp_path / "mine"), "--export", str(tmp_path / "copy")])
    assert result.exit_code == 0
    for name in ("pools.csv", "prices.csv", "availability.csv"):
        assert (tmp_path / "copy" / name).read_text() == (tmp_path / "mine" / name).read_text()


@pytest.mark.slow  # backtests
def test_a_recording_that_cannot_be_used_does_not_stop_the_others(tmp_path: Path) -> None:
    """One unusable folder stopped the whole backtest, also with --trace-set another one."""
    write_folder([flicker(5, hours=60.0)], tmp_path / "mine")
    write_folder([flicker(5, hours=0.2)], tmp_path / "short")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "traces.jsonl").write_text("no json\n")
    arguments = [
        "backtest",
        str(tmp_path),
        "--workers",
        "4",
        "--windows",
        "2",
        "--deadline-ratio",
        "1.2",
        "--processes",
        "1",
    ]
    for only in ([], ["--trace-set", "mine"]):
        result = CliRunner().invoke(app, [*arguments, *only])
        assert result.exit_code == 0, result.output
        assert "flicker (mine), deadline 1.2 x, 2 jobs" in result.stdout
        assert f"skipped: {tmp_path}/damaged/traces.jsonl: line 1: expected a trace" in result.stderr
        assert ("skipped: trace set flicker (short): expected a recording" in result.stderr) == (not only)
    content = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [skipped["what"] for skipped in content["skipped"]] == [
        f"{tmp_path}/damaged/traces.jsonl", "trace set flicker (short)",
    ]  # fmt: skip
    nothing = CliRunner().invoke(app, [*arguments, "--trace-set", "damaged"])
    assert nothing.exit_code == 2
    assert "there are flicker (mine), flicker (short)" in nothing.stderr
    assert "damaged/traces.jsonl: line 1: expected a trace" in nothing.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["nowhere"], 2, "expected a folder of traces"),
        (["{mine}", "--trace-set", "nothing"], 2, "no trace set"),
        (["{mine}", "--deadline-ratio", "0.9"], 2, "deadlines of at least 1"),
    ],
)
def test_a_wrong_backtest_says_what_was_expected(
    tmp_path: Path, arguments: list[str], code: int, expected: str
) -> None:
    write_folder([flicker(5, hours=60.0)], tmp_path / "mine")
    filled = [argument.replace("{mine}", str(tmp_path / "mine")) for argument in arguments]
    result = CliRunner().invoke(app, ["backtest", *filled])
    assert result.exit_code == code
    assert expected in result.stderr


def _lines(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


@pytest.mark.slow  # backtests
def test_doll_backtest_runs_jobs_in_several_regions(tmp_path: Path) -> None:
    write_folder([flicker(5, hours=30.0)], tmp_path / "mine")
    arguments = ["backtest", str(tmp_path / "mine"), "--workers", "3", "--windows", "2", "--deadline-ratio", "1.2",
                 "--job-length", "6h", "--processes", "1", "--regions", "2", "--policy", "diloco",
                 "--model-mb", "5"]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "adaptive-home-only" in result.stdout
    assert "adaptive: met every deadline" in result.stdout
    assert "above the optimum" in result.stdout
    as_json = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert as_json["regions"]["count"] == 2
    assert as_json["regions"]["traffic"]["start_bytes"] == 5e6


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--regions", "3"], "expected 3 pools of one kind of machine"),
        (["--regions", "2", "--boot", "100"], "expected a multiple of --tick"),
        (["--regions", "2", "--policy", "dolly"], "--policy: expected one of doll,"),
        (["--egress", "0.1"], "expected --regions with them"),
        (["--policy", "doll"], "expected --regions with them"),
    ],
)
def test_wrong_options_of_regions_are_refused(tmp_path: Path, options: list[str], expected: str) -> None:
    write_folder([flicker(5, hours=60.0)], tmp_path / "mine")
    result = CliRunner().invoke(app, ["backtest", str(tmp_path / "mine"), "--workers", "2", *options])
    assert result.exit_code == 2
    assert expected in _lines(result.output)
