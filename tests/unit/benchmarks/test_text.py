"""The vocabulary of the benchmarks of texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.text import write_vocabulary
from doll.task.text import Vocabulary

pytestmark = pytest.mark.slow  # loads torch


def test_a_vocabulary_is_written_by_falling_counts(tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    write_vocabulary(path, [b"tea tea cocoa", b"cocoa sugar sugar tea", b"rum"], (), 3)
    assert path.read_text() == "tea 3\ncocoa 2\nsugar 2\n"
    assert Vocabulary.from_file(path).ids(["rum", "sugar"]) == [2]
