"""Every example in a docstring of doll, of doll-lab, and of the formulas of the papers, is true."""

from __future__ import annotations

import doctest
import importlib
from typing import Final

import pytest
from paths import ROOT

PROMPT = ">>> "
MODULES = [
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    for root, folder in ((ROOT, "doll"), (ROOT / "lab", "doll_lab"), (ROOT, "benchmarks/paper"))
    for path in sorted((root / folder).rglob("*.py"))
    if PROMPT in path.read_text()
]


def test_there_are_examples_to_run() -> None:
    assert {"doll.theory.planning", "benchmarks.paper.formulas", "doll.provisioner.planning.estimators"} <= set(MODULES)


TORCH: Final = {"doll.model.random_numbers"}  # load torch, so they are no fast tests


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in TORCH else name for name in MODULES]
)
def test_examples(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.failed == 0
    assert outcome.attempted > 0
