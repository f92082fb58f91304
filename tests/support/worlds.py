"""The worlds of adapters: tests that `make test` leaves out, and the sources whose change makes CI run them.

`tests/worlds.toml` names them. `tests/worlds.lock` has, for each world, the fingerprint of the sources with which its
tests last passed. A world has changed if its fingerprint now is another one. It covers the files that the world names,
the modules of `doll` that import its packages, its tests with what only they import of `tests/support`, and the
versions of its packages in `requirements.lock`.

    python tests/support/worlds.py            # each world: changed or not, seconds when it last passed
    python tests/support/worlds.py changed    # the names of those that changed, for `pytest --worlds`
    python tests/support/worlds.py record ray # its tests have passed with the sources as they are
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ROOT / "tests" / "worlds.toml"
PASSED = ROOT / "tests" / "worlds.lock"
_IMPORT = re.compile(r"^\s*(?:from (\w+)[\w.]* import|import (\w+))", re.MULTILINE)
_LOCKED = re.compile(r"^([a-z0-9-]+)==(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class World:
    """One world. Paths are relative to the repository's root, with `/`.

    Attributes:
        why: what the tests start that other tests do not, and what still catches a break in `make test`.
        tests: its tests: a folder, a module, a test, or those of a module with one parameter (`test_fleet.py[ray]`).
        files: globs of the sources that only this world runs.
        packages: distributions that only this world uses: their importers in `doll` and their locked versions.
    """

    name: str
    why: str
    tests: tuple[str, ...]
    files: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


def worlds(path: Path = NAMES) -> dict[str, World]:
    """The worlds of a file of names, in its order."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: World(name, table["why"], *(tuple(table.get(key, ())) for key in ("tests", "files", "packages")))
        for name, table in tables.items()
    }


def world_of(test_id: str, among: Iterable[World]) -> str | None:
    """The name of the world that has a test, None if `make test` runs it."""
    path, _, parameters = test_id.partition("[")
    for world in among:
        for entry in world.tests:
            prefix, _, parameter = entry.rstrip("]").partition("[")
            is_there = path == prefix or path.startswith((f"{prefix}/", f"{prefix}::"))
            if is_there and (not parameter or parameter in parameters.rstrip("]").split("-")):
                return world.name
    return None


def sources(world: World, root: Path = ROOT) -> list[Path]:
    """The files whose change makes the tests of a world run.

    Raises:
        ValueError: a pattern or a test module matches no file.
    """
    paths: set[Path] = set()
    for pattern in (*world.files, *(re.split(r"::|\[", test)[0] for test in world.tests)):
        matches = [path for path in root.glob(pattern) if "__pycache__" not in path.parts]
        if not matches:
            raise ValueError(f"world {world.name}: expected a file at {pattern!r}, got none")
        for path in matches:
            paths |= {path} if path.is_file() else set(path.rglob("*.py"))
    modules = {package.replace("-", "_") for package in world.packages}
    for path in (root / "doll").rglob("*.py"):
        if modules & _imports(path):
            paths.add(path)
    return sorted(paths | _own_support(paths, root))


def fingerprint(world: World, root: Path = ROOT) -> str:
    """A digest of the sources of a world, and of the versions of its packages."""
    digest = hashlib.sha256()
    for path in sources(world, root):
        digest.update(f"{path.relative_to(root).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    locked = dict(_LOCKED.findall((root / "requirements.lock").read_text(encoding="utf-8")))
    for package in sorted(world.packages):
        digest.update(f"{package}=={locked.get(package)}\n".encode())
    return digest.hexdigest()[:16]


def changed(among: Iterable[World], passed: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """The names of the worlds whose fingerprint is not the one with which their tests last passed."""
    return [world.name for world in among if passed.get(world.name) != fingerprint(world, root)]


@cache
def _imports(path: Path) -> frozenset[str]:
    """The first names of the modules that a file imports, also in functions."""
    return frozenset(one or other for one, other in _IMPORT.findall(path.read_text(encoding="utf-8")))


def _own_support(paths: set[Path], root: Path) -> set[Path]:
    """The modules of `tests/support` that tests of one world import and no other test does."""
    support = {path.stem: path for path in (root / "tests" / "support").glob("*.py")}
    own = {path for path in paths if path.is_relative_to(root / "tests")}
    others = {path for path in (root / "tests").rglob("*.py") if path not in own and path.parent.name != "support"}
    return _reached(own, support) - _reached(others, support)


def _reached(paths: set[Path], support: Mapping[str, Path]) -> set[Path]:
    reached: set[Path] = set()
    left = list(paths)
    while left:
        for name in _imports(left.pop()):
            if name in support and support[name] not in reached:
                reached.add(support[name])
                left.append(support[name])
    return reached


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--worlds", metavar="NAMES", default="all",
        help='tests of adapters\' worlds: "none" leaves all of them out, "ray,wheel" runs these and no other test',
    )  # fmt: skip


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the modules without a test of the named worlds."""
    asked = config.getoption("worlds")
    if asked in ("all", "none") or not collection_path.name.startswith("test_"):
        return None
    path = collection_path.relative_to(ROOT).as_posix()
    named = (world for world in worlds().values() if world.name in asked.split(","))
    entries = {re.split(r"::|\[", test)[0] for world in named for test in world.tests}
    return None if any(path == entry or path.startswith(f"{entry}/") for entry in entries) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.getoption("worlds")
    if asked == "all":
        return
    among = worlds()
    names = set() if asked == "none" else set(asked.split(","))
    if unknown := names - set(among):
        raise pytest.UsageError(f"--worlds: expected names from {NAMES.name}, got {', '.join(sorted(unknown))}")
    kept, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        world = world_of(item.nodeid, among.values())
        (kept if (world in names if names else world is None) else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def main(arguments: list[str]) -> None:
    among = worlds()
    passed: dict[str, str] = json.loads(PASSED.read_text(encoding="utf-8")) if PASSED.exists() else {}
    match arguments:
        case ["changed"]:
            sys.stdout.write(",".join(changed(among.values(), passed)) + "\n")
        case ["record", *names]:
            now = {name: fingerprint(among[name]) for name in names or among}
            kept = {name: print_ for name, print_ in passed.items() if name in among}
            PASSED.write_text(json.dumps(kept | now, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        case []:
            names = changed(among.values(), passed)
            for world in among.values():
                state = "changed" if world.name in names else "as it last passed"
                sys.stdout.write(f"{world.name:<14} {state:<18} {world.why}\n")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
