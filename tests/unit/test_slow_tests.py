"""`make test-fast` is chosen by what tests use: servers, torch, Faust, marks."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import ROOT
from slow_tests import slow_reason


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import json\n", None),
        ("import torch\n", "loads torch by test"),
        ("from torch import nn\n", "loads torch by test"),
        ("def test_it():\n    import faust.app\n", "loads faust by test"),
        ("from doll.model import ModelState\n", "loads torch by test -> doll.model"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n", None),
        ("from doll.records import Update\n", None),
        ("from doll.local.forks import ForkServer\n", "starts servers with doll.local.forks"),
    ],
)
def test_imports_decide(tmp_path: Path, source: str, reason: str | None) -> None:
    path = tmp_path / "test_planted.py"
    path.write_text(source)
    assert slow_reason(path, ["tmp_path"], []) == reason


@pytest.mark.parametrize(
    ("path", "fixtures", "markers", "reason"),
    [
        ("tests/integration/test_planted.py", [], [], "lies in integration/"),
        ("tests/e2e/test_planted.py", [], [], "lies in e2e/"),
        ("tests/unit/test_packing.py", ["job_name", "broker"], [], "uses the fixture broker"),
        ("tests/unit/test_packing.py", [], ["parametrize", "fuzz"], "is marked fuzz"),
        ("tests/unit/test_packing.py", ["tmp_path"], ["parametrize"], None),
    ],
)
def test_folders_fixtures_and_markers_decide(
    path: str, fixtures: list[str], markers: list[str], reason: str | None
) -> None:
    assert slow_reason(ROOT / path, fixtures, markers) == reason
