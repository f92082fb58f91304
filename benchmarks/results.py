"""Files of measured results, and the marked sections of the documents that show them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).resolve().parents[1] / "docs"


CODE = ("doll", "lab", "benchmarks", "examples", "pyproject.toml", "requirements.lock", ":!benchmarks/live/results")
"""What a figure is measured with; what a measurement itself writes is not part of it."""


def git(*words: str, folder: Path = DOCS.parent) -> str | None:
    """What a command of Git prints, in the folder of a checkout; None where it fails, or where there is no Git."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str:
    """The checked-out commit, abbreviated, with `+` where code differs from it; `unknown` outside of a checkout."""
    head = git("rev-parse", "--short=7", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+" if git("status", "--porcelain", "--", *CODE) else "")


def refuse_dirty() -> None:
    """Figures for the documents need a commit that has the code that makes them.

    Raises:
        SystemExit: there is none.
    """
    if (now := commit()) == "unknown" or now.endswith("+"):
        raise SystemExit(f"commit {now}: expected code that is committed, as figures name it: commit your changes, or "
                         "use --quick for a look")  # fmt: skip


def keep(name: str, result: dict[str, Any]) -> Path:
    """Write `result` and the commit to benchmarks/results/<name>.json; returns the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"commit": commit(), **result}, indent=1) + "\n", encoding="utf-8")
    return path


def newest(pattern: str) -> Path:
    """The result that was written last, of those whose name fits.

    Raises:
        FileNotFoundError: there is none.
    """
    paths = sorted(RESULTS.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not paths:
        raise FileNotFoundError(f"expected a result {pattern} in {RESULTS}: run the benchmark first")
    return paths[-1]


def update_section(document: Path, name: str, command: str, text: str) -> None:
    """Replace the text between the marks of section `name` in `document`.

    Args:
        command: what writes the section; it stands in the first mark.

    Raises:
        ValueError: the marks are missing.
    """
    begin_mark, end_mark = f"<!-- {name}: begin, written by `{command}` -->", f"<!-- {name}: end -->"
    before, begin, rest = document.read_text(encoding="utf-8").partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        raise ValueError(f"{document}: expected the marks {begin_mark!r} and {end_mark!r}")
    document.write_text(f"{before}{begin_mark}\n\n{text}\n\n{end_mark}{after}", encoding="utf-8")
