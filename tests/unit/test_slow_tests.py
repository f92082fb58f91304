"""`make test-fast` is chosen by what tests use: servers, torch, Faust, marks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import durations
import pytest
from durations import SLOW_S, WriteSlowTests
from paths import ROOT
from slow_tests import mark, slow_reason


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import json\n", None),
        ("import torch\n", "loads torch by test"),
        ("from torch import nn\n", "loads torch by test"),
        ("def test_it():\n    import faust.app\n", "loads faust by test"),
        ("from doll.model.flat_model import ModelState\n", "loads torch by test -> doll.model.flat_model"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n", None),
        ("from doll.records.control import Update\n", None),
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
        ("tests/unit/records/test_packing.py", ["job_name", "broker"], [], "uses the fixture broker"),
        ("tests/unit/records/test_packing.py", [], ["parametrize", "fuzz"], "is marked fuzz"),
        ("tests/unit/records/test_packing.py", ["tmp_path"], ["parametrize"], None),
    ],
)
def test_folders_fixtures_and_markers_decide(
    path: str, fixtures: list[str], markers: list[str], reason: str | None
) -> None:
    assert slow_reason(ROOT / path, fixtures, markers) == reason


@dataclass
class Item:
    """As much of a test as `mark` looks at."""

    nodeid: str
    path: Path = ROOT / "tests" / "unit" / "records" / "test_packing.py"
    added: list[pytest.MarkDecorator] = field(default_factory=list)

    def iter_markers(self) -> Iterator[pytest.Mark]:
        return iter(())

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.added.append(marker)


def test_what_took_long_is_slow_in_all_its_cases() -> None:
    items = [Item(f"tests/unit/records/test_packing.py::{name}") for name in ("long[1]", "long[2]", "short")]
    mark(cast("list[pytest.Item]", items), {"tests/unit/records/test_packing.py::long": 1.5})
    assert [[marker.args for marker in item.added] for item in items] == [[("took 1.5 s",)]] * 2 + [[]]


def test_the_list_has_functions_whose_cases_take_long_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = WriteSlowTests(tmp_path / "slow.txt")
    for nodeid, seconds in (
        ("a.py::long[1]", 0.6 * SLOW_S),
        ("a.py::long[2]", 0.6 * SLOW_S),
        ("a.py::short", 0.9 * SLOW_S),
    ):
        for when, part in (("setup", 0.0), ("call", seconds), ("teardown", 0.0)):
            report = pytest.TestReport(nodeid, ("a.py", 0, ""), {}, "passed", None, when, duration=part)  # type: ignore[arg-type]
            written.pytest_runtest_logreport(report)
    written.pytest_sessionfinish()
    monkeypatch.setattr(durations, "LIST", tmp_path / "slow.txt")
    assert durations.measured_s.__wrapped__() == {"a.py::long": 0.6}


def test_every_test_of_the_list_exists() -> None:
    for name in durations.measured_s():
        path, _, function = name.partition("::")
        assert f"def {function.rpartition('::')[2]}(" in (ROOT / path).read_text(encoding="utf-8"), (
            f"{name} is no test: run `make test-durations`"
        )
