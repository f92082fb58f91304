"""The runner of live experiments, with experiments that run nothing."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.live.__main__ import main
from benchmarks.live.experiment import Claim, Experiment, Options, Report, Skip, experiments, mean_sd
from benchmarks.tables import Table


def report(options: Options, figure: str = "7") -> Report:
    return Report(
        "A fake",
        [Table("Rows", ("what", "value"), [["a | b", figure]])],
        options.seeds,
        "standard deviation",
        claims=[
            Claim("it holds", "yes", "yes", "reproduced"),
            Claim("it is fast", "2 s", "9 s", "not reproduced", "slow cores"),
        ],
        notes=["A note."],
        data={"x": [1, 2], "y": [3, 4]},
    )


def draw(figure: Any, data: dict[str, Any]) -> None:
    figure.subplots().plot(data["x"], data["y"])


def fake(name: str, run: Callable[[Path, Options], Report], *, with_picture: bool = False) -> Experiment:
    settings = {"values": "1,2"}
    return Experiment(
        name, "A paper, section 3", f"Tries {name}.", settings, (0, 1), run, draw if with_picture else None
    )


class Workplace:
    """The runner with its folders."""

    def __init__(self, folder: Path, *known: Experiment) -> None:
        self.out, self.docs = folder / "results", folder / "docs"
        self.docs.mkdir()
        self.known = {experiment.name: experiment for experiment in known}

    def __call__(self, *words: str) -> int:
        return main([*words, "--out", str(self.out), "--docs", str(self.docs)], self.known)

    def kept(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.out / f"{name}.json").read_text())
        return content

    @property
    def page(self) -> str:
        return (self.docs / "live.md").read_text()


def test_an_experiment_gets_its_options_and_its_figures_are_kept(tmp_path: Path) -> None:
    seen: list[tuple[Path, Options]] = []

    def run(folder: Path, options: Options) -> Report:
        seen.append((folder, options))
        assert folder.is_dir()
        return report(options)

    work = Workplace(tmp_path, fake("one", run), fake("two", run))
    assert work("--only", "one", "--seeds", "3,4", "--set", "values=5", "--data", str(tmp_path)) == 0
    [(folder, options)] = seen
    assert options == Options(tmp_path, (3, 4), {"values": "5"}, False)
    assert not folder.exists(), "a temporary folder goes away"
    kept = work.kept("one")
    assert kept["command"] == 'make paper-live ONLY=one LIVE="--seeds 3,4 --set values=5"'
    assert Report.of(kept["report"]).to_json() == json.loads(json.dumps(report(options).to_json()))
    assert work() == 0
    assert [options.settings for _, options in seen[1:]] == [{"values": "1,2"}] * 2
    assert seen[1][1].seeds == (0, 1)


def test_missing_data_is_said_and_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(folder: Path, options: Options) -> Report:
        options.file("ratings/all.csv", "the ratings")
        return report(options)

    work = Workplace(tmp_path, fake("rated", run))
    assert work("--data", str(tmp_path), "--write") == 0
    said = capsys.readouterr().out
    assert f"rated: skipped: {tmp_path / 'ratings' / 'all.csv'}: expected the ratings" in said
    assert not work.out.exists()
    assert "## " not in work.page
    (tmp_path / "ratings").mkdir()
    (tmp_path / "ratings" / "all.csv").touch()
    assert work("--data", str(tmp_path)) == 0
    assert work.kept("rated")["name"] == "rated"


def test_a_failed_job_fails_the_run_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(folder: Path, options: Options) -> Report:
        raise subprocess.CalledProcessError(3, ["doll", "up", "a job"])

    work = Workplace(tmp_path, fake("bad", fail), fake("good", lambda _, options: report(options)))
    assert work() == 1
    said = capsys.readouterr().out
    assert "bad: a job failed with exit code 3: doll up 'a job'" in said
    assert said.splitlines()[-1] == "FAILED: bad"
    assert [path.stem for path in work.out.iterdir()] == ["good"]


def test_the_page_keeps_sections_that_were_not_run_again(tmp_path: Path) -> None:
    figures = {"a": "10", "b": "20"}
    work = Workplace(
        tmp_path,
        fake("a", lambda _, options: report(options, figures["a"]), with_picture=True),
        fake("b", lambda _, options: report(options, figures["b"])),
    )
    assert work("--write") == 0
    assert "| a \\| b | 10 |" in work.page
    assert "| a \\| b | 20 |" in work.page
    assert "| it is fast | 2 s | 9 s | **not reproduced**: slow cores |" in work.page
    assert "Seeds: 0, 1; standard deviation." in work.page
    assert work.page.count("](live/") == 1
    assert (tmp_path / "docs" / "live" / "a.png").read_bytes().startswith(b"\x89PNG")
    figures.update(a="11", b="21")
    assert work("--only", "a", "--write") == 0
    assert "| a \\| b | 11 |" in work.page
    assert "| a \\| b | 20 |" in work.page, "b was not run again"
    before = work.page
    assert work("--no-run", "--write") == 0
    assert work.page == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "none"], "unknown experiment none: expected some of a"),
        (["--set", "value=1"], "unknown setting value"),
        (["--quick", "--write"], "figures of a look do not go into the documents"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        Workplace(tmp_path, fake("a", lambda _, options: report(options)))(*words)
    assert said in capsys.readouterr().err


def test_the_list_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(folder: Path, options: Options) -> Report:
        raise Skip("not asked for")

    assert Workplace(tmp_path, fake("a", run))("--list") == 0
    assert " ".join(capsys.readouterr().out.split()) == "a A paper, section 3 Tries a. --set values=1,2"


def test_seeds_spread_and_reasons_must_be_stated() -> None:
    good = report(Options())
    with pytest.raises(ValueError, match="seeds"):
        dataclasses.replace(good, seeds=())
    with pytest.raises(ValueError, match="spread"):
        dataclasses.replace(good, spread="")
    with pytest.raises(ValueError, match="reason"):
        Claim("it is fast", "2 s", "9 s", "cannot be tried here")


@pytest.mark.slow  # some of them load torch
def test_the_modules_of_the_folder_keep_to_the_interface() -> None:
    known = experiments()
    assert "mlless_ratings" in known
    for name, experiment in known.items():
        assert experiment.name == name
        assert experiment.about.endswith("."), name
        assert experiment.seeds, name


def test_a_mean_has_its_spread_where_there_is_one() -> None:
    assert mean_sd([1.0, 3.0], 1) == "2.0 ± 1.4"
    assert mean_sd([2.0], 1) == "2.0"
    assert mean_sd([], 1) == "nan"
