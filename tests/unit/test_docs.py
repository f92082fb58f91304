"""The documents: links and anchors resolve, files and modules that they name exist, the glossary is in one format."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from doll.cli.app import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    (
        *(
            ROOT / "README.md",
            ROOT / "AGENTS.md",
            ROOT / "CHANGELOG.md",
            ROOT / "CONTRIBUTING.md",
            ROOT / "llms.txt",
            ROOT / "deploy" / "terraform" / "README.md",
        ),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*/*.md"),
    )
)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Files, and folders of the package.
_PATH = re.compile(r"`((?:doll|tests|benchmarks|deploy|examples)/(?!results)[\w./-]+\.[a-z]+|doll/[a-z_/]+/)`")
_SHELL = re.compile(r"^```sh\n(.*?)^```", re.M | re.S)
_DOLL = re.compile(r"(?:^|[\s/])doll ((?:[^#|&;\\\n]|\\\n)+)")
_OLD_NAMES = {"0024"}  # ADRs that list earlier paths


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    broken = []
    for link in _LINK.findall(document.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_the_text_exist(document: Path) -> None:
    text = document.read_text()
    if document.name[:4] in _OLD_NAMES or "\nStatus: superseded" in text:
        return
    paths = {path.rstrip("/.") for path in _PATH.findall(text)}
    assert sorted(path for path in paths if "<" not in path and not (ROOT / path).exists()) == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "decisions").glob("*.md")), ids=lambda page: page.name[:4])
def test_a_decision_begins_with_its_status(page: Path) -> None:
    status = page.read_text().split("\n\n")[1]
    assert re.match(r"Status: (accepted|superseded by \[\d+\]\(.*?\)), \d+ \w+ 20\d\d[;.]", status)
    assert "supersede" not in status or ".md)" in status


def test_the_glossary_has_one_line_per_term() -> None:
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| **")]
    assert len(rows) > 80
    assert [row for row in rows if row.count(" | ") != 2] == []
    terms = [term for row in rows for term in re.findall(r"\*\*([^*]+)\*\*", row.split(" | ")[0])]
    assert sorted(term for term in set(terms) if terms.count(term) > 1) == []


def options(command: Any) -> dict[str, Any]:
    return {name: param for param in command.params for name in (*param.opts, *param.secondary_opts)}


def wrong(line: str) -> str:
    """What `doll` would refuse of a command line: its command, an option, an option without its value."""
    words = shlex.split(line)
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        if words[0].startswith("-"):
            break
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command = command.get_command(None, words.pop(0))
    known = options(command)
    while words:
        word, _, value = words.pop(0).partition("=")
        if not word.startswith("-") or word == "-":
            continue
        if word not in known:
            return f"no option {word}"
        if not value and not getattr(known[word], "is_flag", False):
            if not words:
                return f"{word} without a value"
            words.pop(0)
    return ""


@pytest.mark.parametrize(
    "document",
    [document for document in DOCUMENTS if "decisions" not in document.parts],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_command_lines_are_ones_that_doll_takes(document: Path) -> None:
    lines = [line for block in _SHELL.findall(document.read_text()) for line in _DOLL.findall(block)]
    refused = {line.strip(): why for line in lines if (why := wrong(line.replace("\\\n", " ")))}
    assert refused == {}


def test_a_wrong_command_line_is_noticed() -> None:
    assert wrong("up digits --set stop.updates=3 --json") == ""
    assert wrong("dead list my.yaml --reason 'a b'") == ""
    assert wrong("upp digits") == "no command upp"
    assert wrong("dead lists my.yaml") == "no command lists"
    assert wrong("up digits --runs-folder here") == "no option --runs-folder"
    assert wrong("plan digits --region") == "--region without a value"


def test_the_readme_is_short_and_begins_with_what_a_newcomer_needs() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    screen = "\n".join(lines[:60])
    wanted = (
        "docs/spot.png",
        "## Install",
        "make setup",
        "## Three commands",
        "doll up digits",
        "applied exactly once",
    )
    places = [screen.find(word) for word in wanted]
    assert -1 not in places, wanted
    assert re.search(r"audit: \d+ offsets produced, \d+ applied exactly once, .* 0 missing, 0 twice", screen)
    assert "## Who should not use it" in lines


def test_the_index_lists_every_page_and_keeps_the_laboratory_apart() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    pages |= {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs" / "guide").glob("*.md")}
    assert sorted(page for page in pages if f"({page})" not in index) == []
    guide, laboratory = index[: index.index("## Reference")], index[index.index("## Laboratory") :]
    assert all(f"({page})" in laboratory and page not in guide for page in ("results.md", "benchmarks.md", "theory.md"))


def test_operations_begins_with_operating() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "docs" / "operations.md").read_text(), re.M)
    assert sections[0] == "Day to day"
    assert sections[-1] == "Crashes and failures"
    assert max(sections.index(name) for name in ("Resuming a run", "Monitoring", "Alerts")) < 10
