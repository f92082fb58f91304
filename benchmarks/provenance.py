"""Lists commits that a page names and Git does not have, and figures whose code has changed since their commit.

    python -m benchmarks.provenance [--all]

A figure's code are the files of this repository that its section names, as a path, a module or a target of make, with
all modules of benchmarks/ that these import, and what those import of the other packages themselves. Of a section that
names several commits, the first one counts. Exits 1 where a commit does not exist.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.results import DOCS, git

ROOT = DOCS.parent
MEASURED = ("docs/results.md", "docs/live.md", "docs/benchmarks.md")
_HASH = re.compile(r"(?<![\w./-])(?=[0-9a-f]*[a-f])(?=[a-f]*[0-9])([0-9a-f]{7,40})(\+?)(?![\w-]|\.\w)")
_COMMIT = re.compile(r"[Cc]ommit `?([0-9a-f]{7,40})(\+?)(?!\w)")
_PATH = re.compile(r"[\w./-]+/[\w.-]+\.\w+")
_MODULE = re.compile(r"\bbenchmarks(?:\.\w+)+")
_LIVE = re.compile(r"\bmake paper-live ONLY=(\w+)")
_TARGET = re.compile(r"\bmake ([\w-]+)")


class Section(NamedTuple):
    """A part of a page under one heading."""

    page: str
    title: str
    text: str


class Figure(NamedTuple):
    """A section with figures of a commit.

    Attributes:
        is_dirty: code differed from the commit when it was measured.
        changed: files of its code that differ from those of the commit.
    """

    section: Section
    commit: str
    is_dirty: bool
    changed: Sequence[str]


def skip_reason(root: Path = ROOT) -> str:
    """Why commits cannot be looked up; empty where they can."""
    if git("rev-parse", "--git-dir", folder=root) is None:
        return "no checkout of Git: commits cannot be looked up"
    if git("rev-parse", "--is-shallow-repository", folder=root) == "true":
        return "a shallow clone: it lacks the commits that pages name; `git fetch --unshallow` gets them"
    return ""


def sections(root: Path, page: str) -> Iterator[Section]:
    """Those of a page, in its order."""
    title, lines, is_code = "", list[str](), False
    for line in (root / page).read_text(encoding="utf-8").splitlines():
        is_code ^= line.startswith("```")
        if line.startswith("#") and not is_code:
            yield Section(page, title, "\n".join(lines))
            title, lines = line.lstrip("# "), []
        lines.append(line)
    yield Section(page, title, "\n".join(lines))


def pages(root: Path) -> list[str]:
    """All pages of the repository."""
    return [str(path.relative_to(root)) for path in (*sorted(root.glob("*.md")), *sorted(root.glob("docs/**/*.md")))]


def unknown_commits(root: Path = ROOT) -> list[tuple[str, str]]:
    """(page, commit) of each commit that is named and does not exist."""
    named = {
        (page, match[1])
        for page in pages(root)
        for match in _HASH.finditer((root / page).read_text(encoding="utf-8"))
    }  # fmt: skip
    return sorted(pair for pair in named if not _exists(root, pair[1]))


def figures(root: Path = ROOT) -> list[Figure]:
    """The sections with figures of a commit that exists, in the order of the pages."""
    measured = []
    for page in (page for page in MEASURED if (root / page).is_file()):
        for section in sections(root, page):
            named = _COMMIT.search(section.text)
            if named is not None and _exists(root, named[1]):
                files = code_of(root, section.text)
                # `git diff` without paths would compare everything.
                diff = git("diff", "--name-only", named[1], "--", *files, folder=root) if files else ""
                measured.append(Figure(section, named[1], named[2] == "+", (diff or "").split()))
    return measured


def code_of(root: Path, text: str) -> list[str]:
    """The files of the code that a text names, and of what they import."""
    modules = set(_MODULE.findall(text))
    modules |= {f"benchmarks.live.{name}" for name in _LIVE.findall(text)}
    recipes = _recipes(root)
    modules |= {name for target in _TARGET.findall(_LIVE.sub("", text)) for name in recipes.get(target, ())}
    paths = {path for path in _PATH.findall(text) if (root / path).is_file() and not path.startswith("docs/")}
    waiting = paths | {path for module in modules for path in _file_of(root, module)}
    files = set[str]()
    while waiting:
        path = waiting.pop()
        files.add(path)
        if path.startswith("benchmarks/") and path.endswith(".py"):
            waiting |= _imported(root, path) - files
    return sorted(files)


@cache
def _recipes(root: Path) -> dict[str, list[str]]:
    """Modules of benchmarks/ by the target of make that runs them."""
    makefile = root / "Makefile"
    parts = re.split(r"^([\w-]+):", makefile.read_text(encoding="utf-8") if makefile.is_file() else "", flags=re.M)
    return {target: _MODULE.findall(recipe) for target, recipe in zip(parts[1::2], parts[2::2], strict=True)}


@cache
def _imported(root: Path, path: str) -> frozenset[str]:
    """Files of this repository that a module imports by itself."""
    names = set[str]()
    for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(path for name in names for path in _file_of(root, name))


def _file_of(root: Path, module: str) -> list[str]:
    """The file of a module of this repository; none for a package, or what is not a module."""
    relative = Path(*module.split("."))
    paths = (folder / relative.with_suffix(".py") for folder in (Path(), Path("lab")))
    return [str(path) for path in paths if (root / path).is_file()]


@cache
def _exists(root: Path, commit: str) -> bool:
    return git("cat-file", "-e", f"{commit}^{{commit}}", folder=root) is not None


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.provenance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="name all files that have changed, and not the first three")
    options = parser.parse_args(arguments)
    if reason := skip_reason(root):
        print(f"skipped: {reason}")
        return 0
    known = figures(root)
    for figure in known:
        if figure.changed or figure.is_dirty:
            shown = figure.changed if options.all else figure.changed[:3]
            more = f", and {len(figure.changed) - len(shown)} more" if len(shown) < len(figure.changed) else ""
            why = [*(["measured with changes that are in no commit"] if figure.is_dirty else []),
                   *([f"changed since: {', '.join(shown)}{more}"] if figure.changed else [])]  # fmt: skip
            print(f"{figure.section.page}: {figure.section.title}: commit {figure.commit}: {'; '.join(why)}")
    old = sum(bool(figure.changed or figure.is_dirty) for figure in known)
    print(f"{len(known)} sections with figures of a commit, the code of {len(known) - old} is as it was")
    missing = unknown_commits(root)
    for page, commit in missing:
        print(f"UNKNOWN  {page}: commit {commit} does not exist")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
