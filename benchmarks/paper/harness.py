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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[1] / "results" / "paper"
PAPER, FORMULA, OURS = "#b279a2", "#333333", "#4c78a8"

Value = float | int | str | None


@dataclass(frozen=True)
class Check:
    """One line of the tables: what the paper says, what the formula gives, what came out here.

    Attributes:
        ok: `ours` meets `criterion`; None where there is nothing to meet, for the comparison only.
    """

    what: str
    paper: Value
    formula: Value
    ours: Value
    criterion: str
    ok: bool | None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if hasattr(value, "item"):  # numpy's numbers are not JSON's
                object.__setattr__(self, name, value.item())


@dataclass
class Result:
    """What one script found.

    Attributes:
        title: heading of its table.
        checks: lines of the table.
        rows: lines of the CSV, with the same keys.
        draw: puts the picture on a figure.
        notes: sentences under the table, among them where the paper's own numbers cannot be right.
    """

    title: str
    checks: list[Check]
    rows: list[dict[str, Value]]
    draw: Callable[[Figure], None]
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(check.ok is not False for check in self.checks)


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
        "seconds": round(seconds, 2),
        "checks": [asdict(check) for check in result.checks],
        "notes": result.notes,
    }
    (folder / f"{name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
        mark = "    " if check.ok is None else "pass" if check.ok else "FAIL"
        numbers = ", ".join(
            f"{key} {show(value)}"
            for key, value in (("paper", check.paper), ("formula", check.formula), ("ours", check.ours))
            if value is not None
        )
        lines.append(f"  {mark}  {check.what}: {numbers}" + (f"  ({check.criterion})" if check.criterion else ""))
    return "\n".join(lines + [f"        {note}" for note in result.notes])


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
    """The command line of one script; exits 1 when a check fails."""
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
