"""Runs all scripts of the papers' figures and tables, and writes their tables into docs/results.md.

    python -m benchmarks.paper [--quick] [--out FOLDER] [--processes N] [--only NAME ...]

A whole run without --quick and --only updates the marked sections of docs/results.md and the figures in docs/paper/.
It needs committed code, since each section names its commit; --write-docs takes the files of several runs.
The run fails where a verdict on a claim is not the one that its script declares.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any

from doll.local.processes import die_with_parent
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.paper import harness
from benchmarks.results import DOCS, refuse_dirty, update_section

# In the order of the document.
SCRIPTS = (
    "rates", "theorem1", "convergence", "planning", "replacement", "fig3", "fig3b", "fig4", "fig5", "table2",
    "mlless_fig4", "mlless_fig7", "mlless_fig8", "mlless_fig9", "mlless_fig12", "mlless_fig13", "mlless_tables",
    "mlless_table5", "mlless_theorem1", "essp_fig1", "essp_fig2", "essp_theorems", "vap_bound",
    "hetpipe_fig1", "hetpipe_fig3", "hetpipe_fig4", "hetpipe_partition", "hetpipe_waiting", "hetpipe_staleness",
    "hetpipe_theorem1", "hetpipe_fig5", "hetpipe_fig6",
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
    "hetpipe_fig5",
    "hetpipe_staleness",
    "hetpipe_fig3",
    "vap_bound",
    "hetpipe_fig1",
)
_PICTURES = (
    "fig3", "fig3b", "fig4", "table2", "mlless_fig4", "mlless_fig7", "mlless_fig8", "mlless_fig9", "mlless_fig12",
    "mlless_fig13", "mlless_table5", "mlless_theorem1", "essp_fig1", "essp_fig2", "essp_theorems", "vap_bound",
    "hetpipe_fig1", "hetpipe_fig3", "hetpipe_fig4", "hetpipe_partition", "hetpipe_waiting", "hetpipe_staleness",
    "hetpipe_theorem1", "hetpipe_fig5", "hetpipe_fig6",
)  # fmt: skip
MARK, CLAIMS_MARK, COMMAND = "paper", "claims", "make paper"
_PAPERS = {"mlless_": "MLLess", "essp_": "ESSP", "vap_": "ESSP", "hetpipe_": "HetPipe"}
"""By the prefix of a script; all others are of DOLL."""
_COUNTED = {
    harness.REPRODUCED: "are reproduced", harness.NOT_REPRODUCED: "are not reproduced",
    harness.CANNOT_BE_TRIED: "cannot be tried here",
}  # fmt: skip


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


def claims_markdown(results: Sequence[dict[str, Any]], when: str) -> str:
    """The table of all claims at the top of docs/results.md.

    Args:
        when: date and commit.
    """
    claims = [(result, check) for result in results for check in result["checks"] if check["paper"] is not None]
    counts = Counter(check["verdict"] for _, check in claims)
    kinds = Counter((check["kind"], check["verdict"]) for _, check in claims)
    own = [check for result in results for check in result["checks"] if check["paper"] is None and check["verdict"]]
    passed = sum(check["is_expected"] for check in own)
    lines = [
        f"{when}, `{COMMAND}`: of {len(claims)} claims of the papers "
        + ", ".join(f"{counts[verdict]} {_COUNTED[verdict]}" for verdict in harness.VERDICTS)
        + f". Besides, {passed} of {len(own)} checks of this code against formulas and reference simulations pass; the "
        "[sections below](#the-papers-figure-by-figure) have them. A run fails where a verdict is not the one that its "
        "script declares, in either direction.",
        "",
        "| kind | what it compares | claims | " + " | ".join(harness.VERDICTS) + " |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for kind, about in harness.KINDS.items():
        each = [kinds[kind, verdict] for verdict in harness.VERDICTS]
        lines.append(_row(kind, about, str(sum(each)), *map(str, each)))
    lines += ["", "| claim of the paper | kind | paper | ours | verdict | cause |", "|---|---|---|---|---|---|"]
    for result, check in claims:
        mark = harness.mark_of(check["verdict"], is_claim=True, is_expected=check["is_expected"])
        if check["verdict"] == harness.NOT_REPRODUCED:
            mark = f"**{mark}**"
        what = f"{_source(result)}: {check['what']}"
        paper, ours = harness.show(check["paper"]), harness.show(check["ours"])
        lines.append(_row(what, check["kind"], paper, ours, mark, check["cause"]))
    return "\n".join(lines)


def _source(result: dict[str, Any]) -> str:
    """Paper and figure.

    >>> _source({"name": "fig3", "title": "Fig. 3a: equal rates"})
    'DOLL, Fig. 3a'
    >>> _source({"name": "hetpipe_fig1", "title": "HetPipe Fig. 1: order"})
    'HetPipe, Fig. 1'
    """
    paper = next((paper for prefix, paper in _PAPERS.items() if result["name"].startswith(prefix)), "DOLL")
    where = result["title"].partition(":")[0].removeprefix(paper).strip(" ,")
    return f"{paper}, {where}" if where else paper


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """The tables of docs/results.md, figure by figure."""
    lines = [
        "Costs are fractions of the cost with all on-demand. “formula” is the corrected form of docs/theory.md or, "
        "where a criterion names it, the value of a separate reference simulation. A line with a value of the paper is "
        "a claim of the paper and has a verdict; the others compare this code with a formula.",
    ]
    for result in results:
        made = f"Commit {result['commit']}, {result['seconds']:.0f} s: `python -m benchmarks.paper.{result['name']}`."
        lines += ["", f"### {result['title']}", "", made, ""]
        if result["name"] in _PICTURES:
            lines += [f"![{result['title']}](paper/{result['name']}.png)", ""]
        lines += ["| | paper | formula | ours | criterion | |", "|---|---|---|---|---|---|"]
        for check in result["checks"]:
            mark = harness.mark_of(
                check["verdict"], is_claim=check["paper"] is not None, is_expected=check["is_expected"]
            )
            values = (harness.show(check[key]) for key in ("paper", "formula", "ours"))
            lines.append(_row(check["what"], *values, check["criterion"], mark))
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
        if dirty := [result["name"] for result in results if not result["commit"].isalnum()]:
            parser.error(f"{', '.join(dirty)}: expected figures of committed code: commit, and run them again")
    else:
        if not options.quick:
            refuse_dirty()
        results = run_all(options.only, options.out, options.quick, max(1, options.processes), console)
    checks = [(result["name"], check) for result in results for check in result["checks"]]
    unexpected = [
        f"{name}: {check['what']}: {check['verdict']}, declared {check['declared']}"
        for name, check in checks
        if not check["is_expected"]
    ]
    counts = Counter(check["verdict"] for _, check in checks if check["paper"] is not None)
    console.print(f"{len(results)} scripts, files in {options.out}; claims of the papers: "
                  + ", ".join(f"{counts[verdict]} {_COUNTED[verdict]}" for verdict in harness.VERDICTS),
                  markup=False, highlight=False)  # fmt: skip
    for line in unexpected:
        console.print(f"UNEXPECTED  {line}", markup=False, highlight=False)
    if len(results) == len(SCRIPTS) and not any(result["quick"] for result in results):
        commits = {result["commit"] for result in results}
        which = f"commit {commits.pop()}" if len(commits) == 1 else f"scripts run at {len(commits)} commits"
        when = f"{date.today()}, {which}"
        update_section(DOCS / "results.md", CLAIMS_MARK, COMMAND, claims_markdown(results, when))
        update_section(DOCS / "results.md", MARK, COMMAND, markdown(results))
        (DOCS / "paper").mkdir(exist_ok=True)
        for name in _PICTURES:
            shutil.copyfile(options.out / f"{name}.png", DOCS / "paper" / f"{name}.png")
        console.print("written: docs/results.md, docs/paper/")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
