"""Runs all scripts of the papers' figures and tables, and writes their tables into docs/results.md.

    python -m benchmarks.paper [--quick] [--out FOLDER] [--processes N] [--only NAME ...]

A whole run without --quick and --only updates the marked section of docs/results.md and the figures in docs/paper/.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any

from doll.local.processes import die_with_parent
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.paper import harness
from benchmarks.results import DOCS, commit, update_section

# In the order of the document.
SCRIPTS = (
    "rates", "theorem1", "convergence", "planning", "replacement", "fig3", "fig3b", "fig4", "fig5", "table2",
    "mlless_fig4", "mlless_fig7", "mlless_fig8", "mlless_fig9", "mlless_fig12", "mlless_fig13", "mlless_tables",
    "mlless_table5", "mlless_theorem1", "essp_fig1", "essp_fig2", "essp_theorems", "vap_bound",
    "hetpipe_fig1", "hetpipe_fig3", "hetpipe_fig4", "hetpipe_partition", "hetpipe_waiting", "hetpipe_staleness",
    "hetpipe_theorem1", "hetpipe_fig6",
)  # fmt: skip
# The longest first, so that two cores end together.
_LONGEST_FIRST = (
    "essp_fig2",
    "hetpipe_theorem1",
    "essp_theorems",
    "fig5",
    "fig3",
    "fig3b",
    "mlless_fig9",
    "mlless_fig12",
    "mlless_fig13",
    "mlless_fig8",
    "mlless_fig7",
    "fig4",
    "mlless_table5",
    "mlless_fig4",
    "mlless_theorem1",
    "table2",
    "hetpipe_partition",
    "replacement",
    "theorem1",
    "planning",
    "rates",
    "convergence",
    "mlless_tables",
    "essp_fig1",
    "hetpipe_fig4",
    "hetpipe_waiting",
    "hetpipe_fig6",
    "hetpipe_staleness",
    "hetpipe_fig3",
    "vap_bound",
    "hetpipe_fig1",
)
_PICTURES = (
    "fig3", "fig3b", "fig4", "table2", "mlless_fig4", "mlless_fig7", "mlless_fig8", "mlless_fig9", "mlless_fig12",
    "mlless_fig13", "mlless_table5", "mlless_theorem1", "essp_fig1", "essp_fig2", "essp_theorems", "vap_bound",
    "hetpipe_fig1", "hetpipe_fig3", "hetpipe_fig4", "hetpipe_partition", "hetpipe_waiting", "hetpipe_staleness",
    "hetpipe_theorem1", "hetpipe_fig6",
)  # fmt: skip
MARK, COMMAND = "paper", "make paper"


def run_all(names: Sequence[str], folder: Path, quick: bool, processes: int, console: Console) -> list[dict[str, Any]]:
    """Run the scripts, a process each, `processes` at a time; the JSON of each, in the order of `names`."""
    jobs = [(name, folder, quick) for name in _LONGEST_FIRST if name in names]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    begin = time.perf_counter()
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), die_with_parent, (os.getpid(),), max_tasks_per_child=1
    )
    with Progress(*columns, console=console, transient=True) as bar, pool:
        task = bar.add_task("figures and tables", total=len(jobs))
        for done in as_completed([pool.submit(harness.run_by_name, *job) for job in jobs]):
            bar.advance(task)
            took = time.perf_counter() - begin
            bar.console.print(f"[{took:4.0f} s] {done.result()}", markup=False, highlight=False)
    return [json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in SCRIPTS if name in names]


def markdown(results: Sequence[dict[str, Any]], when: str) -> str:
    """The tables of docs/results.md.

    Args:
        when: date and commit.
    """
    checks = [check for result in results for check in result["checks"] if check["ok"] is not None]
    passed = sum(check["ok"] for check in checks)
    lines = [
        f"{when}, `make paper`: {passed} of {len(checks)} checks pass. Costs are fractions of the cost with all "
        "on-demand. “formula” is the corrected form of docs/theory.md or, where a criterion names it, the value of "
        "a separate reference simulation.",
    ]
    for result in results:
        lines += ["", f"### {result['title']}", ""]
        if result["name"] in _PICTURES:
            lines += [f"![{result['title']}](paper/{result['name']}.png)", ""]
        lines += ["| | paper | formula | ours | criterion | |", "|---|---|---|---|---|---|"]
        for check in result["checks"]:
            mark = {True: "pass", False: "**FAIL**", None: ""}[check["ok"]]
            cells = (
                check["what"],
                *(harness.show(check[key]) for key in ("paper", "formula", "ours")),
                check["criterion"],
                mark,
            )
            lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
        lines += ["", *(f"- {note}" for note in result["notes"])]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.add_options(parser)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="scripts at a time [default: cores]")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="NAME", help=", ".join(SCRIPTS))
    parser.add_argument(
        "--write-docs", action="store_true", help="write the tables from the files that --out has, run nothing"
    )
    options = parser.parse_args(arguments)
    console = Console()
    if options.write_docs:
        results = [json.loads((options.out / f"{name}.json").read_text(encoding="utf-8")) for name in SCRIPTS]
    else:
        results = run_all(options.only, options.out, options.quick, max(1, options.processes), console)
    failed = [f"{result['name']}: {check['what']}" for result in results for check in result["checks"]
              if check["ok"] is False]  # fmt: skip
    console.print(f"{len(results)} scripts, files in {options.out}", markup=False, highlight=False)
    for line in failed:
        console.print(f"FAIL  {line}", markup=False, highlight=False)
    if len(results) == len(SCRIPTS) and not any(result["quick"] for result in results):
        when = f"{date.today()}, commit {commit()}"
        update_section(DOCS / "results.md", MARK, COMMAND, markdown(results, when))
        (DOCS / "paper").mkdir(exist_ok=True)
        for name in _PICTURES:
            shutil.copyfile(options.out / f"{name}.png", DOCS / "paper" / f"{name}.png")
        console.print("written: docs/results.md, docs/paper/")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
