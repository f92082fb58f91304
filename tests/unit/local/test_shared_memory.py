"""A run's folder in shared memory goes with the run, also when that is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from doll.local import shared_memory

HOLD = """
import sys
from pathlib import Path
from doll.local.shared_memory import run_folder
with run_folder(Path(sys.argv[1])) as folder:
    (folder / "blob").write_bytes(bytes(100))
    print(folder, flush=True)
    sys.stdin.read()
"""


def hold(place: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another run with a folder at `place`."""
    run = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    return run, Path(run.stdout.readline().strip())


def test_it_goes_at_the_end(tmp_path: Path) -> None:
    with shared_memory.run_folder(tmp_path) as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "blob").write_bytes(b"1")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError), shared_memory.run_folder(tmp_path):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_next_run_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    killed, left = hold(tmp_path)
    alive, kept = hold(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "doll-blobs-link").symlink_to(tmp_path / "other")
    try:
        killed.kill()
        killed.wait(300)
        assert (left / "blob").is_file()
        with shared_memory.run_folder(tmp_path) as mine:
            assert not left.exists()
            assert (kept / "blob").is_file()
            assert mine.is_dir()
        assert (tmp_path / "other").is_dir()
    finally:
        killed.communicate(timeout=300)
        alive.communicate(timeout=300)  # closes its input: it ends in order
    assert not kept.exists()


def test_says_why_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No such file" in (shared_memory.obstacle(tmp_path / "missing") or "")
    monkeypatch.setattr(shared_memory, "_MIN_FREE_BYTES", 10**18)
    assert "MiB free, expected" in (shared_memory.obstacle(tmp_path) or "")
    monkeypatch.setattr(shared_memory, "_MIN_FREE_BYTES", 0)
    assert shared_memory.obstacle(tmp_path) is None
