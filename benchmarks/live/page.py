"""docs/live.md, from the kept results: a section for each experiment that was run, with its tables and its picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.live.experiment import Experiment, Report
from benchmarks.results import DOCS
from benchmarks.tables import Table

RESULTS: Final = Path(__file__).parent / "results"
_HEAD: Final = """# The papers' experiments on real jobs

Each section is one experiment: `doll up` with a local Kafka broker and worker processes, on the papers' data. Where it
is something else, the section says so. `make paper-live ONLY=name WRITE=1` runs it again, keeps its figures in
`benchmarks/live/results/`, and makes this page from all that are kept. The data sets are not part of the repository;
an experiment whose files are missing names them, and is skipped.
"""


def keep(folder: Path, name: str, content: Mapping[str, Any]) -> Path:
    """Write the result of an experiment; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def kept(folder: Path, experiments: Mapping[str, Experiment]) -> dict[str, dict[str, Any]]:
    """The results by name, in the order of `experiments`; those of experiments that no longer exist are left out."""
    paths = {name: folder / f"{name}.json" for name in experiments}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def write(folder: Path, experiments: Mapping[str, Experiment], docs: Path = DOCS) -> Path:
    """Write live.md and its pictures (live/<name>.png) into `docs` from the results in `folder`; returns the page."""
    parts = [_HEAD]
    for name, result in kept(folder, experiments).items():
        picture = None
        if (draw := experiments[name].draw) is not None:
            from doll_lab.figures import new_figure

            picture = docs / "live" / f"{name}.png"
            picture.parent.mkdir(exist_ok=True)
            figure = new_figure(9.0, 3.8)
            draw(figure, result["report"]["data"])
            figure.savefig(picture)
        parts.append(section(name, result, has_picture=picture is not None))
    page = docs / "live.md"
    page.write_text("\n".join(parts), encoding="utf-8")
    return page


def section(name: str, result: Mapping[str, Any], *, has_picture: bool) -> str:
    """One section of the page, in Markdown."""
    report = Report.of(result["report"])
    seeds = ", ".join(str(seed) for seed in report.seeds)
    lines = [
        f"## {report.title}",
        "",
        f"{result['paper']}. {result['date']}, commit {result['commit']}, {result['cores']} cores, "
        f"load {result['load_before']:g} before it began, {result['took_s'] / 60:.1f} minutes: "
        f"`{result['command']}`. Seeds: {seeds}; {report.spread}.",
    ]
    if report.claims:
        lines += ["", claims_table(report).markdown()]
    for table in report.tables:
        lines += ["", table.markdown()]
    if has_picture:
        lines += ["", f"![{report.title}](live/{name}.png)"]
    if report.notes:
        lines += ["", *(f"- {note}" for note in report.notes)]
    return "\n".join([*lines, ""])


def claims_table(report: Report) -> Table:
    """What the paper says, what came out here, and the verdict with its reason."""
    columns = ("claim", "paper", "here", "verdict")
    table = Table("The paper's claims", columns, left=columns)
    for claim in report.claims:
        reason = f": {claim.why}" if claim.why else ""
        verdict = claim.verdict if claim.verdict == "reproduced" else f"**{claim.verdict}**"
        table.rows.append([claim.claim, claim.paper, claim.ours, verdict + reason])
    return table


def text(report: Report) -> str:
    """A report for a terminal."""
    tables = [claims_table(report)] if report.claims else []
    parts = [table.text() for table in (*tables, *report.tables)]
    return "\n".join([report.title, *parts, *report.notes, f"{report.spread}"])
