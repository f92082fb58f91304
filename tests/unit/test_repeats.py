"""No two places of the Python code hold more than ten lines of the same logic."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import ROOT
from repeats import repeats

MAX_LINES = 10
BODY = "".join(f"    step_{n}(x)\n" for n in range(MAX_LINES + 1))


@pytest.mark.slow  # reads all code
def test_no_logic_stands_twice() -> None:
    paths = [path for folder in ("doll", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert repeats(paths, MAX_LINES) == []


def test_what_stands_twice_is_seen(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text(f"def f(x):\n{BODY}")
    two.write_text(f'def g(x):\n    """Another comment, the same steps."""\n    y = 1\n{BODY}    return y\n')
    assert repeats([one, two], MAX_LINES) == [f"{one}:1 ~ {two}:1"]
    assert repeats([one, two], MAX_LINES + 1) == []


def test_two_places_of_one_file_are_two(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(f"def f(x):\n{BODY}\n\ndef g(x):\n{BODY}")
    assert repeats([file], MAX_LINES) == [f"{file}:1 ~ {file}:{MAX_LINES + 5}"]


def test_a_function_in_a_function_is_no_second_place(tmp_path: Path) -> None:
    nested = tmp_path / "nested.py"
    nested.write_text("def f():\n    def g(x):\n" + BODY.replace("    ", "        ") + "    return g\n")
    assert repeats([nested], MAX_LINES) == []
