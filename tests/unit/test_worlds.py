"""The tests that `make test` leaves out, and what makes CI run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paths import ROOT
from worlds import PASSED, World, changed, fingerprint, pytest_ignore_collect, sources, world_of, worlds

WORLDS = worlds()
RAY = World(
    "ray", "a cluster", tests=("tests/test_ray.py", "tests/test_fleet.py[ray]"), files=("doll/fleet/*.py",),
    packages=("ray",),
)  # fmt: skip
FILES = {
    "doll/fleet/actors.py": "",
    "doll/head.py": "def head():\n    import ray\n",
    "doll/core.py": "",
    "tests/test_ray.py": "import ray_rig\n",
    "tests/test_fleet.py": "import rig\n",
    "tests/test_core.py": "import rig\n",
    "tests/support/ray_rig.py": "import ray_nodes",
    "tests/support/ray_nodes.py": "",
    "tests/support/rig.py": "",
    "requirements.lock": "ray==2.50.0 \\\n    --hash=sha256:0\nredis==7.0.0\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_sources_are_the_importers_of_its_packages_and_what_only_its_tests_use(root: Path) -> None:
    assert {path.relative_to(root).as_posix() for path in sources(RAY, root)} == {
        "doll/fleet/actors.py", "doll/head.py", "tests/test_ray.py", "tests/test_fleet.py",
        "tests/support/ray_rig.py", "tests/support/ray_nodes.py",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "is_changed"),
    [
        ("doll/head.py", "import ray", True),
        ("doll/fleet/new.py", "", True),
        ("tests/support/ray_nodes.py", "x = 1", True),
        ("requirements.lock", FILES["requirements.lock"].replace("2.50.0", "2.50.1"), True),
        ("requirements.lock", FILES["requirements.lock"].replace("7.0.0", "7.0.1"), False),
        ("doll/core.py", "x = 1", False),
        ("tests/support/rig.py", "x = 1", False),
    ],
)
def test_a_world_has_changed_if_one_of_its_sources_has(root: Path, name: str, text: str, is_changed: bool) -> None:
    passed = {"ray": fingerprint(RAY, root)}
    assert changed([RAY], passed, root) == []
    (root / name).write_text(text)
    assert changed([RAY], passed, root) == (["ray"] if is_changed else [])


def test_a_world_whose_tests_never_passed_has_changed(root: Path) -> None:
    assert changed([RAY], {}, root) == ["ray"]


def test_a_pattern_without_a_file_is_an_error(root: Path) -> None:
    (root / "doll" / "fleet" / "actors.py").unlink()
    with pytest.raises(ValueError, match=r"world ray: expected a file at 'doll/fleet/\*.py', got none"):
        sources(RAY, root)


@pytest.mark.parametrize(
    ("test_id", "world"),
    [
        ("tests/test_ray.py::test_a", "ray"),
        ("tests/test_ray.py::test_a[1]", "ray"),
        ("tests/test_ray_rules.py::test_a", None),
        ("tests/test_fleet.py::test_a[ray]", "ray"),
        ("tests/test_fleet.py::test_a[ray-spot]", "ray"),
        ("tests/test_fleet.py::test_a[array]", None),
        ("tests/test_fleet.py::test_a[ec2]", None),
        ("tests/test_fleet.py::test_ray", None),
    ],
)
def test_each_test_is_in_one_world_or_in_none(test_id: str, world: str | None) -> None:
    assert world_of(test_id, [RAY]) == world


def test_modules_without_a_test_of_the_named_worlds_are_not_imported(pytestconfig: pytest.Config) -> None:
    before = pytestconfig.option.worlds
    try:
        for names, module, is_ignored in (
            ("ray", "tests/integration/test_ray.py", None),
            ("ray", "tests/integration/test_join.py", True),
            ("ray,joins", "tests/integration/test_join.py", None),
            ("benchmarks", "tests/unit/benchmarks/test_where.py", None),
            ("none", "tests/integration/test_ray.py", None),
        ):
            pytestconfig.option.worlds = names
            assert pytest_ignore_collect(ROOT / module, pytestconfig) is is_ignored, (names, module)
    finally:
        pytestconfig.option.worlds = before


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_every_world_has_sources_tests_and_a_reason(world: World) -> None:
    assert fingerprint(world) == fingerprint(world)
    assert world.why
    for test in world.tests:
        _, _, function = test.partition("::")
        if function:
            path = ROOT / test.partition("::")[0]
            assert f"def {function.partition('[')[0]}(" in path.read_text(encoding="utf-8"), test
    locked = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert all(f"\n{package}==" in locked for package in world.packages)


def test_no_package_is_of_two_worlds() -> None:
    packages = [package for world in WORLDS.values() for package in world.packages]
    assert len(set(packages)) == len(packages)


def test_what_has_passed_are_worlds() -> None:
    assert json.loads(PASSED.read_text(encoding="utf-8")).keys() <= WORLDS.keys()
