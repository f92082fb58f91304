"""`make release`: when it refuses, and that the same commit gives the same bytes."""

from __future__ import annotations

import os
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import doll
import pytest
from deploy_scripts import load
from paths import ROOT

release = load("release")
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [1.2.0] - 2026-11-27\n\n- old\n\n## [1.1.0] - 2026-11-01\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository in which version 1.2.0 may be released."""
    (tmp_path / "doll").mkdir()
    (tmp_path / "doll" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    own = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false")
    subprocess.run(["git", *own, *arguments], cwd=folder, check=True, timeout=60)


def commit(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "all")


def test_a_commit_with_an_entry_and_no_tag_may_be_released(checkout: Path) -> None:
    assert release.problems(checkout, "1.2.0") == []


def test_each_reason_against_a_release_says_what_to_do(checkout: Path) -> None:
    (version,) = release.problems(checkout, "1.1.1")[:1]
    assert "VERSION is 1.1.1, and doll/__init__.py has 1.2.0" in version
    git(checkout, "tag", "v1.2.0")
    (checkout / "CHANGELOG.md").write_text(CHANGELOG.replace("[1.2.0]", "[1.3.0]"))
    (checkout / "left-over").write_text("")
    dirty, tag, entry = release.problems(checkout, "1.2.0")
    assert all(name in dirty for name in ("commit or remove", "CHANGELOG.md", "left-over"))
    assert "v1.2.0 exists" in tag
    assert "'## [1.2.0] - YYYY-MM-DD'" in entry
    with pytest.raises(release.ReleaseError, match="left-over"):
        release.release(checkout, "1.2.0")
    assert not (checkout / "dist").exists()


@pytest.mark.parametrize(("version", "text"), [("1.2.0", "- old"), ("1.1.0", ""), ("1.2", ""), ("1x2.0", "")])
def test_an_entry_is_what_stands_under_its_heading(version: str, text: str) -> None:
    assert release.entry(CHANGELOG, version) == text


def test_the_version_is_in_one_place_and_has_an_entry() -> None:
    assert release.version(ROOT) == doll.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "doll/__init__.py"
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert changelog.index("## [Unreleased]") < changelog.index(f"## [{doll.__version__}]")
    assert release.entry(changelog, doll.__version__)


def test_the_images_of_others_are_named_by_tag() -> None:
    images = release.other_images(ROOT)
    assert {image.partition(":")[0] for image in images} == {
        "apache/kafka", "grafana/grafana", "prom/prometheus", "valkey/valkey",
    }  # fmt: skip
    assert "doll:local" not in images
    assert all(":" in image for image in images)


def test_what_was_not_built_is_said_with_the_command_that_builds_it() -> None:
    command = release.image_command("doll:1.2.0", "abc")
    files = [Path("doll_online-1.2.0.tar.gz")]
    text = release.report("1.2.0", "abc", files, ["redis:7"], command, built=False)
    assert "NOT built" in text
    assert "docker build --tag=doll:1.2.0 --label=org.opencontainers.image.version=1.2.0" in text
    assert "twine upload dist/doll_online-1.2.0.tar.gz" in text
    assert "NOT built" not in release.report("1.2.0", "abc", files, [], command, built=True)


@pytest.mark.parametrize("built", [True, False])
def test_a_release_without_its_image_is_no_success(
    built: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(release, "release", lambda *arguments: ("DOLL 1.2.0", built))
    monkeypatch.setattr(release.sys, "argv", ["release.py", "1.2.0"])
    assert release.main() == (0 if built else 1)
    said = capsys.readouterr()
    assert "DOLL 1.2.0" in said.out
    assert ("the image is not built" in said.err) == (not built)


@pytest.mark.slow
def test_the_same_commit_gives_the_same_bytes_wherever_it_is_built(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone: there is no commit to build from")
    sums = []
    for name, mask in (("a", 0o022), ("another/place", 0o077)):
        before = os.umask(mask)
        try:
            time_s = release.export(ROOT, tmp_path / name)
            files = release.build(tmp_path / name, tmp_path / f"{name}-dist", time_s)
        finally:
            os.umask(before)
        sums.append(release.checksums(files))
    assert sums[0] == sums[1]
    lab, wheel, archive = files
    release.check_metadata(files)
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    assert {
        "doll/local/kafka-jars.txt",
        "doll/examples/digits/job.yaml",
        "doll/examples/digits/notebook.ipynb",
    } <= names
    with zipfile.ZipFile(lab) as file:
        assert "doll_lab/backtests/backtest.py" in file.namelist()
    assert lab.name.split("-")[1] == wheel.name.split("-")[1]
    assert not any(name.endswith(".pyc") or name.startswith("tests/") for name in names)
    with tarfile.open(archive) as tar:
        assert max(member.mtime for member in tar.getmembers()) == time_s
