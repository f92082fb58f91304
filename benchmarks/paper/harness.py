"""What the scripts share: checks with their criterion, and a CSV, a PNG and a JSON for each script."""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.results import commit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[1] / "results" / "paper"
PAPER, FORMULA, OURS = "#b279a2", "#333333", "#4c78a8"

Value = float | int | str | None
Verdict = Literal["reproduced", "not reproduced", "cannot be tried here"]
REPRODUCED: Verdict = "reproduced"
NOT_REPRODUCED: Verdict = "not reproduced"
CANNOT_BE_TRIED: Verdict = "cannot be tried here"
VERDICTS = (REPRODUCED, NOT_REPRODUCED, CANNOT_BE_TRIED)
Kind = Literal["value", "order", "formula", "arithmetic"]
KINDS: dict[Kind, str] = {
    "value": "a number that the paper measured, within a tolerance",
    "order": "which is larger, or in which direction it goes",
    "formula": "a formula or a theorem of the paper, against simulation or brute force",
    "arithmetic": "the paper's printed numbers, computed from one another",
}
"""What a claim of a paper is, from the one that says most to the one that says least."""


@dataclass(frozen=True)
class Check:
    """One line of the tables: what the paper says, what the formula gives, what came out here.

    A check with a value of the paper is a claim of the paper, and has a kind and a verdict. Its criterion is then about
    what the paper says. A check without one compares this code with a formula or with a reference simulation.
    `claim` and `cannot_be_tried` make the former.

    Attributes:
        ok: `ours` meets `criterion`; None where there is nothing to meet, for the comparison only.
        declared: the verdict that the script expects. Any other one makes the run fail: a claim that fails without a
            declared cause, and one that is declared as not reproduced and is.
        cause: why it is not reproduced, or cannot be tried; empty where it is reproduced.
        kind: what a claim of the paper is; None for all other checks.

    Raises:
        ValueError: a claim without a kind or a verdict, a kind without a claim, a verdict without its cause, or a cause
            without such a verdict.
    """

    what: str
    paper: Value
    formula: Value
    ours: Value
    criterion: str
    ok: bool | None
    declared: Verdict = REPRODUCED
    cause: str = ""
    kind: Kind | None = None

    def __post_init__(self) -> None:
        if self.is_claim != (self.kind in KINDS):
            raise ValueError(
                f"{self.what}: expected a kind of a claim alone, one of {', '.join(KINDS)}, got {self.kind!r}"
            )
        for name, value in vars(self).items():
            if hasattr(value, "item"):  # numpy's numbers are not JSON's
                object.__setattr__(self, name, value.item())
        if (self.declared == REPRODUCED) == bool(self.cause):
            raise ValueError(f"{self.what}: {self.declared!r}: expected a cause with the two other verdicts alone")
        if (self.declared == CANNOT_BE_TRIED) != (self.ok is None) and (self.is_claim or self.declared != REPRODUCED):
            raise ValueError(
                f"{self.what}: expected an outcome of a claim that can be tried, and none of one that cannot be tried, "
                f"got {self.declared!r} with {self.ok}"
            )

    @property
    def is_claim(self) -> bool:
        """It is about what the paper says."""
        return self.paper is not None

    @property
    def verdict(self) -> Verdict | None:
        """What came out; None where there is nothing to meet."""
        if self.declared == CANNOT_BE_TRIED:
            return CANNOT_BE_TRIED
        return None if self.ok is None else REPRODUCED if self.ok else NOT_REPRODUCED

    @property
    def is_expected(self) -> bool:
        """The verdict is the declared one, or there is nothing to meet."""
        return self.verdict in (None, self.declared)


def claim(
    kind: Kind, what: str, paper: Value, ours: Value, criterion: str, ok: bool, not_reproduced: str = "",
    *, formula: Value = None,
) -> Check:  # fmt: skip
    """A claim of the paper.

    Args:
        not_reproduced: why it is not; default: it is expected to be reproduced.
        formula: what another formula or reference gives, for comparison.
    """
    declared = NOT_REPRODUCED if not_reproduced else REPRODUCED
    return Check(what, paper, formula, ours, criterion, ok, declared, not_reproduced, kind)


def cannot_be_tried(kind: Kind, what: str, paper: Value, cause: str) -> Check:
    """A claim of the paper that nothing here can try."""
    return Check(what, paper, None, None, "", None, CANNOT_BE_TRIED, cause, kind)


def near(value: float, paper: float, share: float) -> bool:
    """Whether a value is within this share of the paper's.

    >>> near(1.36, 1.8, 0.2), near(1.5, 1.8, 0.2)
    (False, True)
    """
    return abs(value / paper - 1.0) <= share


@dataclass
class Result:
    """What one script found.

    Attributes:
        title: heading of its table.
        checks: lines of the table.
        rows: lines of the CSV, with the same keys.
        draw: puts the picture on a figure.
        notes: sentences under the table.
    """

    title: str
    checks: list[Check]
    rows: list[dict[str, Value]]
    draw: Callable[[Figure], None]
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """All verdicts are as declared."""
        return all(check.is_expected for check in self.checks)


Script = Callable[[bool], Result]


def save(name: str, result: Result, folder: Path, seconds: float, quick: bool) -> None:
    """Write `name`.csv, .png and .json."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(result.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(result.rows)
    figure = Figure(figsize=(8.0, 3.6), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    result.draw(figure)
    figure.savefig(folder / f"{name}.png")
    content = {
        "name": name,
        "title": result.title,
        "ok": result.ok,
        "quick": quick,
        "commit": commit(),
        "seconds": round(seconds, 2),
        "checks": [as_json(check) for check in result.checks],
        "notes": result.notes,
    }
    (folder / f"{name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def as_json(check: Check) -> dict[str, Any]:
    """The fields of a check, with its verdict and whether that is the declared one."""
    return {**asdict(check), "verdict": check.verdict, "is_expected": check.is_expected}


def run(name: str, script: Script, folder: Path, quick: bool) -> Result:
    """Run a script and keep its files."""
    begin = time.perf_counter()
    result = script(quick)
    save(name, result, folder, time.perf_counter() - begin, quick)
    return result


def run_by_name(name: str, folder: Path, quick: bool) -> str:
    """Run a script and keep its files; its checks for a terminal."""
    script: Script = importlib.import_module(f"benchmarks.paper.{name}").run
    return text(name, run(name, script, folder, quick))


def text(name: str, result: Result) -> str:
    """The checks for a terminal."""
    lines = [f"{name}: {result.title}"]
    for check in result.checks:
        mark = mark_of(check.verdict, is_claim=check.is_claim, is_expected=check.is_expected)
        numbers = ", ".join(
            f"{key} {show(value)}"
            for key, value in (("paper", check.paper), ("formula", check.formula), ("ours", check.ours))
            if value is not None
        )
        lines.append(f"  {mark:20}  {check.what}: {numbers}" + (f"  ({check.criterion})" if check.criterion else ""))
    return "\n".join(lines + [f"  {'':20}  {note}" for note in result.notes])


def mark_of(verdict: Verdict | None, *, is_claim: bool, is_expected: bool) -> str:
    """The last column of a table: the verdict on a claim, or whether a check of this code passes.

    >>> mark_of(NOT_REPRODUCED, is_claim=True, is_expected=True), mark_of(REPRODUCED, is_claim=False, is_expected=True)
    ('not reproduced', 'pass')
    >>> mark_of(REPRODUCED, is_claim=True, is_expected=False)
    'UNEXPECTED: reproduced'
    """
    if verdict is None:
        return ""
    if is_claim:
        return verdict if is_expected else f"UNEXPECTED: {verdict}"
    return "pass" if is_expected else "FAIL"


def show(value: Value) -> str:
    """For a table: four decimals, four digits where that says more, or the text itself."""
    if value is None:
        return "–"
    if isinstance(value, float):
        if math.isnan(value):
            return "–"
        return f"{value:.4f}".rstrip("0").rstrip(".") if 0.01 <= abs(value) < 1000 else f"{value:.4g}"
    return str(value)


def main(name: str, script: Script, arguments: Sequence[str] | None = None) -> None:
    """The command line of one script; exits 1 when a verdict is not the declared one."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.paper.{name}", description=sys.modules["__main__"].__doc__
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    result = run(name, script, options.out, options.quick)
    print(text(name, result))
    print(f"written: {options.out / name}.csv, .png, .json")
    sys.exit(0 if result.ok else 1)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="a look: small sizes, wide criteria, seconds instead of minutes"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder for the files [default: benchmarks/results/paper]"
    )
