"""The package layout: the contracts of import-linter hold, and what these cannot see.

`pyproject.toml` has the contracts: the order of packages and of sub-packages, pure modules, adapters of vendors.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

MAX_LINES = 1000  # one class in one file: three files by inheritance are harder to read than a long one
FILE_METHODS = {
    "read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "rmdir", "unlink", "touch", "iterdir", "exists",
    "is_file", "is_dir", "symlink_to", "hardlink_to", "chmod",
}  # fmt: skip


def test_the_contracts_of_import_linter_hold() -> None:
    """In a process of its own: import-linter configures logging, and disables the loggers of other tests."""
    done = subprocess.run([Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def pure_modules() -> Iterator[Path]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    pure = next(contract for contract in contracts if contract["name"].startswith("Pure modules"))
    for name in pure["source_modules"]:
        path = (ROOT / "lab" if name.startswith("doll_lab.") else ROOT) / name.replace(".", "/")
        yield from path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]


def file_calls(source: str) -> list[str]:
    """Names of the functions and methods in `source` that read or write files."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    functions = [call.id for call in calls if isinstance(call, ast.Name) and call.id == "open"]
    return functions + [call.attr for call in calls if isinstance(call, ast.Attribute) and call.attr in FILE_METHODS]


def test_pure_modules_touch_no_files() -> None:
    assert file_calls("with open('x') as file:\n    Path('y').write_text('')\n") == ["open", "write_text"]
    assert {path.stem: calls for path in pure_modules() if (calls := file_calls(path.read_text()))} == {}


def test_no_module_is_long() -> None:
    paths = [path for folder in ("doll", "lab") for path in (ROOT / folder).rglob("*.py")]
    lengths = {path: len(path.read_text().splitlines()) for path in paths}
    assert {str(path): length for path, length in lengths.items() if length > MAX_LINES} == {}
