"""One spelling for one meaning, over all commands; times in one way."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from doll.cli.app import app
from doll.cli.options import METAVAR, JobOptions, seconds
from doll.telemetry import get_logger
from paths import EXAMPLES
from typer import BadParameter
from typer.testing import CliRunner

# What an option is about, by the variable that takes it, where the name of the variable does not say so.
MEANING = {
    "overrides": "set", "job_option": "job", "as_json": "json", "deadline_s": "deadline", "boot_s": "boot",
    "cycle_s": "cycle", "service_s": "service", "timeout_s": "timeout",
    "keep_alive_s": "keep_alive", "interval_s": "interval",
}  # fmt: skip
TIMES = {
    "deadline", "cycle", "boot", "service", "replan", "tick", "seconds", "job_length", "timeout", "keep_alive",
    "interval",
}  # fmt: skip


def options() -> Iterator[tuple[str, Any]]:
    """(command, option) of every command and sub-command."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
        for param in command.params:
            if param.param_type_name == "option":
                yield name, param
        for inner in (command.get_command(None, word) for word in getattr(command, "commands", ())):
            yield from walk(inner, f"{name} {inner.name}".strip())

    yield from walk(typer.main.get_command(app), "")


def test_options_of_one_meaning_have_one_spelling_on_every_command() -> None:
    by_meaning: dict[str, dict[tuple[str, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    by_spelling: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for command, option in options():
        meaning = MEANING.get(option.name, option.name)
        spelled = tuple(sorted((*option.opts, *option.secondary_opts)))
        by_meaning[meaning][spelled].append(command)
        for spelling in spelled:
            by_spelling[spelling][meaning].append(command)
    assert len(by_meaning) > 30
    assert {key: dict(uses) for key, uses in by_meaning.items() if len(uses) > 1} == {}
    assert {key: dict(uses) for key, uses in by_spelling.items() if len(uses) > 1} == {}
    assert set(by_meaning["workers"][("--workers", "-N")]) == {"plan", "simulate", "backtest", "scale", "regrid"}
    assert set(by_meaning["group_size"][("--group-size", "-K")]) == {"plan", "simulate", "regrid"}
    assert set(by_meaning["batch_size"][("--batch-size", "-b")]) == {"plan", "simulate", "regrid"}
    assert set(by_meaning["updates"][("--updates", "-J")]) == {"plan", "simulate"}
    assert set(by_meaning["deadline"][("--deadline",)]) == {"plan", "simulate", "spot"}


def test_every_time_is_written_in_the_same_way() -> None:
    for command, option in options():
        for spelling in option.opts:
            assert not spelling.endswith(("-s", "-hours", "-seconds")), f"{command} {spelling}: the value has the unit"
        assert (option.metavar == METAVAR) == (MEANING.get(option.name, option.name) in TIMES), (
            f"{command} {option.opts}"
        )


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [("5400", 5400), ("90m", 5400), ("1.5h", 5400), ("1h30m", 5400), ("1 h 30 min", 5400), ("2d", 172_800),
     (".5s", 0.5), ("20ms", 0.02), ("1e3", 1000), ("0", 0), (180.0, 180)],
)  # fmt: skip
def test_a_time_has_one_meaning(text: str, expected_s: float) -> None:
    assert seconds(text) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    "text", ["", "soon", "-5", "90 minutes", "1h30", "h", "1e999", "nan", "inf", "5x", "1_000", "9" * 400]
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(BadParameter, match="expected a time"):
        seconds(text)


SMALL = ["simulate", "-N", "4", "-K", "2", "-b", "8", "-J", "20", "--json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["--rate", "50", "--deadline", "60", "--boot", "1", "--replan", "5"],
         ["--rate", "50", "--deadline", "1m", "--boot", "1s", "--replan", "5000ms"]),
        (["--rate", "50", "--service", "0.01"], ["--rate", "50", "--service", "10ms"]),
        (["--rate", "50", "--rate", "40", "--rate", "30", "--rate", "20"], ["--rate", "50,40,30,20"]),
    ],
)  # fmt: skip
def test_two_ways_to_write_a_value_mean_the_same(one: list[str], other: list[str]) -> None:
    results = []
    for arguments in (one, other):
        result = CliRunner().invoke(app, [*SMALL, *arguments])
        assert result.exit_code == 0, result.output
        results.append(json.loads(result.stdout))
    assert results[0] == results[1]


def test_a_deadline_in_minutes_is_taken_by_plan_and_spot_alike() -> None:
    plan = ["plan", "-N", "4", "--rate", "50", "-K", "2", "-b", "8", "-J", "2000", "--spot-price", "1",
            "--on-demand-price", "2", "--json"]  # fmt: skip
    as_text, as_number = (
        json.loads(CliRunner().invoke(app, [*plan, "--deadline", text]).stdout) for text in ("90m", "5400")
    )
    assert as_text == as_number


def test_a_command_logs_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Its standard output is a result; `--json` writes it as one document."""
    JobOptions(job=EXAMPLES / "digits" / "job.yaml", overrides=["log.format=json"]).target()
    get_logger("doll").info("resumed_with_changes", changes="loss")
    out, err = capsys.readouterr()
    assert out == ""
    assert json.loads(err)["event"] == "resumed_with_changes"
