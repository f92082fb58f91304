"""`doll dashboard` as a user runs it, on the folder of a run that has ended."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from doll.run.folder import RunFolder
from page_feed import ask, job

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = RunFolder(tmp_path)
    run.write_job(job(4))
    run.report.write_text('{"reason": "updates: 1 reached", "error": null}')
    return tmp_path


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "doll", "dashboard", *arguments], stderr=subprocess.PIPE, text=True)


@contextmanager
def shown(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command, and the port that it says."""
    process = command(*arguments)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        address = re.search(r"http://[\d.]+:(\d+)", line)
        assert address is not None, line + process.stderr.read()
        yield process, int(address[1])
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_it_serves_the_folder_until_ctrl_c(folder: Path) -> None:
    with shown(str(folder)) as (process, port):
        status, _, body = ask(port, "/")
        assert (status, b"Is it learning?" in body) == (200, True)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_other_machines_need_a_token(folder: Path, tmp_path: Path) -> None:
    process = command(str(folder), "--host", "0.0.0.0")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "expected --token-file FILE with a secret" in said
    token = tmp_path / "page.token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    with shown(str(folder), "--host", "0.0.0.0", "--token-file", str(token)) as (_, port):
        assert ask(port, "/page.js")[0] == 401
        assert ask(port, "/page.js", headers={"Authorization": "Bearer 0123456789abcdef"})[0] == 200
