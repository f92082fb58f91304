"""The documents: links and anchors resolve, files and modules that they name exist, the glossary is in one format."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    (
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "deploy" / "terraform" / "README.md"),
        *(ROOT / "docs").rglob("*.md"),
    )
)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Files, and folders of the package.
_PATH = re.compile(r"`((?:doll|tests|benchmarks|deploy|examples)/(?!results)[\w./-]+\.[a-z]+|doll/[a-z_/]+/)`")
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
    if document.name[:4] in _OLD_NAMES:
        return
    paths = {path.rstrip("/.") for path in _PATH.findall(document.read_text())}
    assert sorted(path for path in paths if "<" not in path and not (ROOT / path).exists()) == []


def test_the_glossary_has_one_line_per_term() -> None:
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| **")]
    assert len(rows) > 80
    assert [row for row in rows if row.count(" | ") != 2] == []
    terms = [term for row in rows for term in re.findall(r"\*\*([^*]+)\*\*", row.split(" | ")[0])]
    assert sorted(term for term in set(terms) if terms.count(term) > 1) == []
