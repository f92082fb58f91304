"""The verdicts on the papers' claims: a run fails where one is not the declared one, in either direction."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
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

FAILS = claim("order", 1.8, 1.36, "≥ 1.5", False, "bandwidth")
HOLDS = claim("order", 1.8, 1.7, "≥ 1.5", True)
UNTRIED = cannot_be_tried("images/s", 339, "no such GPUs")
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
        (claim("fails, and no cause is declared", 1.8, 1.36, "≥ 1.5", False), NOT_REPRODUCED, False),
        (claim("declared as failing, and holds", 1.8, 1.7, "≥ 1.5", True, "bandwidth"), REPRODUCED, False),
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
        Check("order", 1.8, None, 1.36, "≥ 1.5", ok, declared, cause)


def test_numbers_of_numpy_become_json() -> None:
    check = claim("order", 1.8, np.float64(1.5), "> 1", np.float64(1.5) > 1)  # type: ignore[arg-type]
    assert json.loads(json.dumps(as_json(check)))["verdict"] == REPRODUCED
    assert type(check.ok) is bool


def as_file(*checks: Check) -> dict[str, object]:
    return {
        "name": "hetpipe_fig4", "title": "HetPipe Fig. 4: order", "notes": [],
        "checks": [as_json(each) for each in checks],
    }  # fmt: skip


def test_the_table_shows_every_claim_and_counts_by_verdict() -> None:
    text = claims_markdown([as_file(HOLDS, FAILS, FAILS, UNTRIED, OWN, SHOWN)], "today")
    assert "of 4 claims of the papers 1 are reproduced, 2 are not reproduced, 1 cannot be tried here" in text
    assert "1 of 1 checks of this code" in text
    rows = [line for line in text.splitlines() if line.startswith("| HetPipe")]
    assert rows == [
        "| HetPipe, Fig. 4: order | 1.8 | 1.7 | reproduced |  |",
        "| HetPipe, Fig. 4: order | 1.8 | 1.36 | **not reproduced** | bandwidth |",
        "| HetPipe, Fig. 4: order | 1.8 | 1.36 | **not reproduced** | bandwidth |",
        "| HetPipe, Fig. 4: images/s | 339 | – | cannot be tried here | no such GPUs |",
    ]


def test_a_verdict_that_is_not_declared_is_marked() -> None:
    surprise = claim("order", 1.8, 1.7, "≥ 1.5", True, "bandwidth")
    assert "UNEXPECTED: reproduced" in claims_markdown([as_file(surprise)], "today")
    assert "UNEXPECTED: reproduced" in markdown([as_file(surprise)])
    assert "UNEXPECTED" not in markdown([as_file(HOLDS, FAILS, UNTRIED, OWN, SHOWN)])


def test_a_script_exits_with_an_error_on_an_undeclared_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness.sys, "argv", ["script"])  # type: ignore[attr-defined]
    for checks, code in (((FAILS, UNTRIED), 0), ((claim("order", 2, 1, "≥ 2", False),), 1)):
        with pytest.raises(SystemExit) as stopped:
            harness.main("script", lambda quick, checks=checks: result(*checks), ["--out", str(tmp_path)])  # type: ignore[misc]
        assert stopped.value.code == code
    assert "UNEXPECTED: not reproduced" in capsys.readouterr().out


def test_every_paper_has_scripts() -> None:
    assert {name.partition("_")[0] for name in SCRIPTS} >= {"fig3", "mlless", "essp", "hetpipe"}
