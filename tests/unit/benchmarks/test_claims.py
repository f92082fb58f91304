"""The verdicts on the papers' claims: a run fails where one is not the declared one, in either direction."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks import results
from benchmarks.paper import __main__ as paper
from benchmarks.paper import harness
from benchmarks.paper.__main__ import SCRIPTS, claims_markdown, markdown
from benchmarks.paper.harness import (
    CANNOT_BE_TRIED,
    NOT_REPRODUCED,
    REPRODUCED,
    Check,
    Result,
    as_json,
    cannot_be_tried,
    claim,
)

FAILS = claim("order", "order", 1.8, 1.36, "≥ 1.5", False, "bandwidth")
HOLDS = claim("value", "order", 1.8, 1.7, "≥ 1.5", True)
UNTRIED = cannot_be_tried("value", "images/s", 339, "no such GPUs")
OWN = Check("rate", None, 1.0, 1.0, "± 1 %", True)
SHOWN = Check("workers left", None, None, 12, "", None)


def result(*checks: Check) -> Result:
    return Result("HetPipe Fig. 4: order", list(checks), [{"a": 1}], lambda figure: None)


@pytest.mark.parametrize(
    ("check", "verdict", "is_expected"),
    [
        (HOLDS, REPRODUCED, True),
        (FAILS, NOT_REPRODUCED, True),
        (UNTRIED, CANNOT_BE_TRIED, True),
        (OWN, REPRODUCED, True),
        (SHOWN, None, True),
        (claim("order", "fails, and no cause is declared", 1.8, 1.36, "≥ 1.5", False), NOT_REPRODUCED, False),
        (claim("order", "declared as failing, and holds", 1.8, 1.7, "≥ 1.5", True, "bandwidth"), REPRODUCED, False),
        (Check("own check that fails", None, 1.0, 2.0, "± 1 %", False), NOT_REPRODUCED, False),
    ],
)
def test_a_verdict_must_be_the_declared_one(check: Check, verdict: str | None, is_expected: bool) -> None:
    assert (check.verdict, check.is_expected) == (verdict, is_expected)
    assert result(OWN, check).ok is is_expected


@pytest.mark.parametrize(
    ("ok", "declared", "cause", "message"),
    [
        (False, NOT_REPRODUCED, "", "expected a cause"),
        (None, CANNOT_BE_TRIED, "", "expected a cause"),
        (True, REPRODUCED, "a cause", "expected a cause"),
        (None, REPRODUCED, "", "expected an outcome"),
        (None, NOT_REPRODUCED, "a cause", "expected an outcome"),
        (False, CANNOT_BE_TRIED, "a cause", "expected an outcome"),
    ],
)
def test_a_claim_without_a_verdict_and_a_verdict_without_its_cause_are_refused(
    ok: bool | None, declared: harness.Verdict, cause: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Check("order", 1.8, None, 1.36, "≥ 1.5", ok, declared, cause, "order")


@pytest.mark.parametrize(("paper", "kind"), [(1.8, None), (1.8, "guess"), (None, "order")])
def test_a_claim_without_its_kind_and_a_kind_without_a_claim_are_refused(
    paper: float | None, kind: harness.Kind | None
) -> None:
    with pytest.raises(ValueError, match="expected a kind of a claim alone, one of value, order, formula, arithmetic"):
        Check("order", paper, None, 1.36, "≥ 1.5", True, kind=kind)


def test_numbers_of_numpy_become_json() -> None:
    check = claim("order", "order", 1.8, np.float64(1.5), "> 1", np.float64(1.5) > 1)  # type: ignore[arg-type]
    assert json.loads(json.dumps(as_json(check)))["verdict"] == REPRODUCED
    assert type(check.ok) is bool


def as_file(*checks: Check) -> dict[str, object]:
    return {
        "name": "hetpipe_fig4", "title": "HetPipe Fig. 4: order", "notes": [], "commit": "1234567", "seconds": 2.4,
        "checks": [as_json(each) for each in checks],
    }  # fmt: skip


def test_the_table_shows_every_claim_and_counts_by_verdict() -> None:
    text = claims_markdown([as_file(HOLDS, FAILS, FAILS, UNTRIED, OWN, SHOWN)], "today")
    assert "of 4 claims of the papers 1 are reproduced, 2 are not reproduced, 1 cannot be tried here" in text
    assert "1 of 1 checks of this code" in text
    rows = [line for line in text.splitlines() if line.startswith("| HetPipe")]
    assert rows == [
        "| HetPipe, Fig. 4: order | value | 1.8 | 1.7 | reproduced |  |",
        "| HetPipe, Fig. 4: order | order | 1.8 | 1.36 | **not reproduced** | bandwidth |",
        "| HetPipe, Fig. 4: order | order | 1.8 | 1.36 | **not reproduced** | bandwidth |",
        "| HetPipe, Fig. 4: images/s | value | 339 | – | cannot be tried here | no such GPUs |",
    ]
    by_kind = {line.split(" | ")[0]: line.split(" | ")[2:] for line in text.splitlines() if line.startswith("| ")}
    assert by_kind["| value"] == ["2", "1", "0", "1 |"]
    assert by_kind["| order"] == ["2", "0", "2", "0 |"]
    assert by_kind["| formula"] == ["0", "0", "0", "0 |"]


def test_a_section_names_its_commit_and_its_command() -> None:
    assert "Commit 1234567, 2 s: `python -m benchmarks.paper.hetpipe_fig4`." in markdown([as_file(HOLDS)])


def test_figures_for_the_documents_need_committed_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "SCRIPTS", ("fig3",))
    for at in ("1234567+", "unknown"):
        monkeypatch.setattr(results, "commit", lambda at=at: at)
        with pytest.raises(SystemExit, match="expected code that is committed"):
            paper.main(["--out", str(tmp_path)])
    (tmp_path / "fig3.json").write_text(json.dumps({**as_file(HOLDS), "name": "fig3", "commit": "1234567+"}))
    with pytest.raises(SystemExit):
        paper.main(["--out", str(tmp_path), "--write-docs"])


def test_a_verdict_that_is_not_declared_is_marked() -> None:
    surprise = claim("order", "order", 1.8, 1.7, "≥ 1.5", True, "bandwidth")
    assert "UNEXPECTED: reproduced" in claims_markdown([as_file(surprise)], "today")
    assert "UNEXPECTED: reproduced" in markdown([as_file(surprise)])
    assert "UNEXPECTED" not in markdown([as_file(HOLDS, FAILS, UNTRIED, OWN, SHOWN)])


def test_a_script_exits_with_an_error_on_an_undeclared_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness.sys, "argv", ["script"])  # type: ignore[attr-defined]
    for checks, code in (((FAILS, UNTRIED), 0), ((claim("order", "order", 2, 1, "≥ 2", False),), 1)):
        with pytest.raises(SystemExit) as stopped:
            harness.main("script", lambda quick, checks=checks: result(*checks), ["--out", str(tmp_path)])  # type: ignore[misc]
        assert stopped.value.code == code
    assert "UNEXPECTED: not reproduced" in capsys.readouterr().out


def test_every_paper_has_scripts() -> None:
    assert {name.partition("_")[0] for name in SCRIPTS} >= {"fig3", "mlless", "essp", "hetpipe"}
