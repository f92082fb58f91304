"""Tables of a result of `benchmarks.pipeline`: `python -m benchmarks.report [FILE] [--docs]` (or `make bench-docs`).

FILE is benchmarks/results/<time>.json, by default the newest. `--docs` puts the tables into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.goals import goals
from benchmarks.results import DOCS, newest, update_section
from benchmarks.tables import Table

MARK, COMMAND = "bench", "make bench-docs"
INTAKE_MARK, INTAKE_COMMAND = "intake", 'make bench BENCH="--only B --docs"'
# Of the rows of DOLL: key, heading, digits.
ANATOMY = (
    ("apply_ms", "apply", 1), ("compute_ms", "compute", 1), ("fetch_ms", "fetch weights", 1),
    ("store_ms", "store gradient", 1), ("grant_to_fetch_p50_ms", "grant to fetch p50", 2),
    ("grant_to_fetch_p99_ms", "p99", 2), ("grant_to_gradient_p50_ms", "grant to gradient p50", 2),
    ("grant_to_gradient_p99_ms", "p99", 2), ("gradient_to_push_p50_ms", "gradient to push p50", 2),
    ("gradient_to_push_p99_ms", "p99", 2), ("grant_to_update_p50_ms", "grant to update p50", 1),
    ("grant_to_update_p99_ms", "p99", 1), ("period_ms", "period", 1),
)  # fmt: skip
_MET = {True: "met", False: "**NO**", None: "not measured"}


def summarize(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per measurement: median, range, and in section A the ratio to the bare loops of its repetition."""
    rows: list[dict[str, Any]] = []
    for section, name in dict.fromkeys((run["section"], run["name"]) for run in runs):
        mine = [run for run in runs if (run["section"], run["name"]) == (section, name)]
        row: dict[str, Any] = {
            "section": section, "name": name, "n": len(mine), **spread([run["value"] for run in mine]),
            "others": spread([run["others"] for run in mine]),
        }  # fmt: skip
        if "share" in mine[0]:
            row["share"] = spread([run["share"] for run in mine])
        if section == "A" and not name.endswith("bare"):
            bare = [run["value"] for run in runs if run["name"] == name.rsplit(" ", 1)[0] + " bare"]
            # Two of each repetition, around DOLL's run.
            bases = [statistics.mean(bare[i : i + 2]) for i in range(0, len(bare), 2)]
            row["ratio"] = spread([run["value"] / base for run, base in zip(mine, bases, strict=False)])
        for key in mine[0].keys() & {"apply_share", *(key for key, _, _ in ANATOMY)}:
            row[key] = statistics.median(run[key] for run in mine)
        rows.append(row)
    return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Throughput, anatomy and goals."""
    first = Table(
        "A throughput and B intake in samples/s, E measured update rate over its prediction: median (range)",
        ("", "what", "n", "figure", "range", "ratio to bare", "range", "share", "range", "others"),
    )
    for row in rows:
        digits = 4 if row["section"] == "E" else 0
        cells = [row["section"], row["name"], str(row["n"]), *_cells(row, digits)]
        for key in ("ratio", "share"):
            cells += _cells(row[key], 3) if key in row else ["", ""]
        first.rows.append([*cells, f"{row['others']['median']:.0%}"])
    result = [first]
    if of_doll := [row for row in rows if "apply_share" in row]:
        second = Table(
            "C parameter server and D latency of DOLL: medians, milliseconds",
            ("what", "apply / compute", *(heading for _, heading, _ in ANATOMY)),
        )
        for row in of_doll:
            figures = [f"{row[key]:.{digits}f}" for key, _, digits in ANATOMY]
            second.rows.append([row["name"], f"{row['apply_share']:.1%}", *figures])
        result.append(second)
    if verdicts := goals(rows):
        third = Table("Goals", ("what", "goal", "measured", "met"))
        third.rows += [[goal.what, goal.goal, goal.measured, _MET[goal.met]] for goal in verdicts]
        result.append(third)
    return result


def _cells(spread: dict[str, float], digits: int) -> list[str]:
    low, high = spread["low"], spread["high"]
    return [f"{spread['median']:,.{digits}f}", f"{low:,.{digits}f} to {high:,.{digits}f}" if low < high else ""]


def conditions(result: dict[str, Any]) -> str:
    """When and where the result was measured."""
    others = [row["others"]["median"] for row in result["rows"]] or [0.0]
    channel = f", control channel `{result['channel']}`" if result.get("channel") else ""
    began = result["began"].replace("T", " ")
    return (
        f"{began}, commit {result.get('commit', 'unknown')}, {result['cores']} cores, "
        f"load {result['load_before']:g} before it began, "
        f"other processes took {min(others):.0%} to {max(others):.0%} of the machine (median of a row); "
        f"{result['repetitions']} repetitions of {result['seconds']:g} s per run{channel}; "
        f"{result['took_s'] / 60:.0f} minutes in all (`{result['command']}`)."
    )


def show(path: Path) -> str:
    """The tables for a terminal; also written beside the result, as .txt."""
    result = json.loads(path.read_text(encoding="utf-8"))
    parts = [conditions(result), *(table.text() for table in tables(result["rows"]))]
    text = "\n".join(parts)
    path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    return f"{text}\nwritten: {os.path.relpath(path)} and {path.with_suffix('.txt').name}"


def write_docs(path: Path) -> None:
    """Replace the section of docs/benchmarks.md that shows the last run: of one of intake alone, a section of its own.

    Raises:
        ValueError: the document does not have its marks.
    """
    result = json.loads(path.read_text(encoding="utf-8"))
    text = "\n\n".join([conditions(result), *(table.markdown() for table in tables(result["rows"]))])
    of_intake = {row["section"] for row in result["rows"]} == {"B"}
    mark, command = (INTAKE_MARK, INTAKE_COMMAND) if of_intake else (MARK, COMMAND)
    update_section(DOCS / "benchmarks.md", mark, command, text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="default: the newest result")
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/benchmarks.md")
    args = parser.parse_args(argv)
    path = args.file or newest("[0-9]*.json")
    print(show(path))
    if args.docs:
        write_docs(path)
        print("written: docs/benchmarks.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
