"""One word for one thing: replaced names, archaic turns and citations of unpublished documents do not come back.

docs/glossary.md has the words to use. Each pattern below has the word that replaces it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
SUFFIXES: Final = {
    ".py",
    ".md",
    ".yaml",
    ".yml",
    ".tf",
    ".hcl",
    ".sh",
    ".service",
    ".timer",
    ".json",
    ".tfvars",
    ".xml",
}
PLACES: Final = ("doll", "docs", "deploy", "examples", "benchmarks")
FILES: Final = ("README.md", "CONTRIBUTING.md", "Makefile", "Dockerfile", "docker-compose.yml", "pyproject.toml")

# Variables that do not name the thing: these are refused in tests, too.
VARIABLES: Final = {
    r"\bfor one in\b|\blambda one\b": "the thing's name",
    r"^\s*(found|told)\b(: [\w\[\], |]+)? = |\bfor (found|told) in\b|\bas (found|told):": "the thing's name",
}
# Pattern (of a whole line, case matters where a class is meant), and what to write instead.
BANNED: Final = {
    # names
    r"\bps_epoch\w*|(?<!leader )\b[Ee]pochs?\b": "term (server), session (worker) or incarnation (machine)",
    r"(?<![Ee]-)\b([Kk]afka_?)?[Mm]ail\b": "commands, JobRecords",
    r"(?<!Dead)\bLetter\b": "DeadLetter, TimedRecord",
    r"\b[Rr]ivals?\b": "baseline",
    r"\b[Oo]utlook\b": "assessment",
    r"\b([Cc]rew|[Mm]uster(ed|s)?|[Cc]ompanions?|[Cc]ampaigns?|[Oo]bituar(y|ies))\b": "SpotWorkerPool, RunHook",
    r"\b_(Seat|Voice|Ears|Beat)\b|\bPulse\b|\bTrouble\b|\bBook\b|\bbooks?\b": "the glossary's word",
    r"\b(bad_pool_s|boot_most_s|surprise)\b": "pool_backoff_s, boot_timeout_s, no_notice_share",
    r"\b[Yy]ardsticks?\b": "reference",
    r"\b(up|down|an?|its|of a) spells?\b": "up time, down time",
    r"\bclairvoyant\b": "oracle",
    r"\bnext_token\b|\bwaiting_tokens\b|\bcomputing_tokens\b": "next_batch, waiting_batches",
    **VARIABLES,
    # prose
    r"\b[Mm]end(s|ed|ing)?\b": "fix",
    r"\b[Hh]eed(s|ed|ing)?\b": "follow",
    r"\b(to|can|could|cannot|may) be had\b": "available",
    r"\banew\b": "again, over",
    r"\bshall\b": "must, should",
    r"\bheirs?\b": "successor",
    r"\bas can be\b": "as possible",
    r"\b(it|them|that|which|him) no more\b|\bno more of\b": "not any more",
    r"\b[Hh]and(s|ed|ing)?( \w+){0,4} back\b(?! to)": "return, terminate",
    r"\b[Ss]igns? of life\b|\bheard of (it|them|him|another)\b": "heartbeat",
    r"\bin vain\b|\bfor ever\b|\ban imitation\b|\bwithout a word\b|\baloud\b": "plain words",
    # documents that are not in the repository
    r"\bdigest (D?\d|[A-Z]\d)|\(digest\b|\bdesign, section\b|\bpitfall \d|\(reference [a-z-]+ \d": "the paper",
}

# In folders of `doll/` that were gone through: add yours.
PLAIN_FOLDERS: Final = (
    "api", "cli", "config", "consumers", "control", "dashboard", "evaluation", "formats", "kafka", "ledger",
    "local", "metrics", "model", "monitor", "optim", "pipeline", "process", "producers", "provisioner", "ps", "records",
    "run", "serving", "storage", "tables", "task", "theory",
)  # fmt: skip
PLAIN: Final = {
    r'^\s*"""(Of|As|By|For|None|Nothing|What)\b': "a noun with its article, or a verb",
    r"\bdef of\b": "what the function does",
}

# (part of the path, part of the line): why it may stay.
ALLOWED: Final = (
    ("tests/unit/test_words.py", "", "has the words as examples"),
    ("docs/glossary.md", "*Not*", "says which word not to use"),
    ("docs/decisions/0024", "", "lists the earlier names"),
    ("docs/decisions/", "were called mail", "says what was renamed"),
    ("docs/decisions/", "was called worker epoch", "says what was renamed"),
)


def texts(places: Iterable[str], files: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    """Path and content of all code and documents."""
    paths = [path for place in places for path in (ROOT / place).rglob("*") if path.suffix in SUFFIXES]
    for path in sorted((*paths, *(ROOT / name for name in files))):
        name = str(path.relative_to(ROOT))
        if path.is_file() and "/results/" not in name and ".terraform/" not in name:
            yield name, path.read_text(encoding="utf-8")


def violations(banned: Mapping[str, str], searched: Iterable[tuple[str, str]]) -> list[str]:
    """`path:line: text -> word` of every replaced word."""
    patterns = [(re.compile(pattern, re.MULTILINE), instead) for pattern, instead in banned.items()]
    return [
        f"{name}:{number}: {match.group(0).strip()!r} -> {instead}"
        for name, text in searched
        for pattern, instead in patterns
        if pattern.search(text) is not None  # most texts are searched once, not line by line
        for number, line in enumerate(text.splitlines(), 1)
        if (match := pattern.search(line)) is not None
        and not any(place in name and allowed in line for place, allowed, _ in ALLOWED)
    ]


@pytest.mark.slow
def test_no_replaced_word_comes_back() -> None:
    assert violations(BANNED, texts(PLACES, FILES)) == []


def test_docstrings_begin_with_a_noun_or_a_verb_and_functions_say_what_they_do() -> None:
    assert violations(PLAIN, texts([f"doll/{folder}" for folder in PLAIN_FOLDERS])) == []


def test_variables_in_tests_name_the_thing() -> None:
    assert violations(VARIABLES, texts(["tests"])) == []


@pytest.mark.parametrize(
    "line",
    [
        "    ps_epoch: int",
        "for one in records:",
        "        found = {}",
        "mend what can be mended",
        "as cheap as can be",
        "no spot to be had",
        "the job begins anew",
        "Hand every machine back.",
        "holds it no more",
        "no sign of life for 30 s",
        "see digest D3",
        "(design, section 4)",
        "class Letter:",
        "from doll.provisioner.kafka_mail import Mail",
        '    """What it does."""',
        "    def of(cls) -> int:",
    ],
)
def test_the_patterns_match_what_they_are_for(line: str) -> None:
    assert any(re.search(pattern, line) for pattern in (*BANNED, *PLAIN))


@pytest.mark.parametrize(
    "line",
    ["DeadLetter(worker=0)", "a dead letter", "set it back to 0", "I recommend this", "one in records", '"""Often."""'],
)
def test_the_patterns_match_nothing_else(line: str) -> None:
    assert not any(re.search(pattern, line) for pattern in (*BANNED, *PLAIN))
