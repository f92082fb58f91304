"""Commits that pages name exist, and figures that are older than their code are listed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from benchmarks import provenance, results


def test_the_commits_that_the_pages_of_this_repository_name_exist() -> None:
    if reason := provenance.skip_reason():
        pytest.skip(reason)
    assert provenance.unknown_commits() == []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A commit with `benchmarks/speed.py`, which imports `doll/core.py` by way of `benchmarks/base.py`."""
    files = {
        "benchmarks/speed.py": "from benchmarks import base\n",
        "benchmarks/base.py": "import doll.core\nfrom doll_lab.grid import Grid\n",
        "doll/core.py": "import doll.deep\n",
        "doll/deep.py": "",
        "lab/doll_lab/grid.py": "",
        "Makefile": "bench-speed: setup ## fast?\n\t@python -m benchmarks.speed\n",
        "docs/live.md": "",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, "code")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(folder: Path, message: str) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message)
    return git(folder, "rev-parse", "--short=7", "HEAD")


def page(folder: Path, *lines: str) -> None:
    (folder / "docs" / "live.md").write_text("\n".join(("# Live", *lines)))


@pytest.mark.parametrize("named", ["`python -m benchmarks.speed`", "`make bench-speed`", "`benchmarks/speed.py`"])
def test_a_figure_whose_code_has_changed_is_listed_with_the_files(checkout: Path, named: str) -> None:
    page(checkout, "## Speed", f"Commit {head(checkout)}: {named}.")
    assert [figure.changed for figure in provenance.figures(checkout)] == [[]]
    (checkout / "doll" / "deep.py").write_text("x = 1\n")
    commit(checkout, "what is imported by others of the package does not count")
    assert [figure.changed for figure in provenance.figures(checkout)] == [[]]
    (checkout / "doll" / "core.py").write_text("x = 2\n")
    (checkout / "lab" / "doll_lab" / "grid.py").write_text("x = 2\n")
    commit(checkout, "two files of it")
    (figure,) = provenance.figures(checkout)
    assert list(figure.changed) == ["doll/core.py", "lab/doll_lab/grid.py"]
    assert (figure.section.title, figure.is_dirty) == ("Speed", False)


def head(folder: Path) -> str:
    return git(folder, "rev-parse", "--short=7", "HEAD")


def test_a_commit_that_does_not_exist_fails_the_check(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page(
        checkout, f"commit {head(checkout)}+, `make bench-speed`; 1234567 samples, 0.1a2b3c4d, 12.7deadbe1 and deadbeef"
    )
    assert provenance.unknown_commits(checkout) == []
    assert provenance.main([], checkout) == 0
    assert "measured with changes that are in no commit" in capsys.readouterr().out
    page(checkout, "commit dead0123, once")
    assert provenance.unknown_commits(checkout) == [("docs/live.md", "dead0123")]
    assert provenance.main([], checkout) == 1
    assert "UNKNOWN  docs/live.md: commit dead0123 does not exist" in capsys.readouterr().out


def test_without_the_history_it_says_why_it_skips(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "docs" / "live.md").write_text(f"commit {head(checkout)}\n")
    commit(checkout, "a second one")
    shallow = tmp_path_factory.mktemp("shallow")
    git(shallow, "clone", "--quiet", "--depth", "1", checkout.as_uri(), ".")
    assert "a shallow clone" in provenance.skip_reason(shallow)
    assert provenance.main([], shallow) == 0
    assert "skipped: a shallow clone" in capsys.readouterr().out
    tarball = tmp_path_factory.mktemp("tarball")
    assert "no checkout of Git" in provenance.skip_reason(tarball)


def test_a_commit_is_dirty_where_code_differs_from_it(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = results.git
    monkeypatch.setattr(results, "git", lambda *words: ask(*words, folder=checkout))
    (checkout / "docs" / "live.md").write_text("new\n")
    assert results.commit() == head(checkout), "what a measurement writes is no code"
    (checkout / "benchmarks" / "new.py").write_text("")
    assert results.commit() == head(checkout) + "+"
    with pytest.raises(SystemExit, match="expected code that is committed"):
        results.refuse_dirty()
