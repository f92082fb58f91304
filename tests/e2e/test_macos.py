"""A whole job without what macOS lacks: every process is one of `tests/support/darwin/sitecustomize.py`.

What this cannot show is what macOS itself does: this is Linux, and so is all code in C.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from doll.local.redis_server import find_executable
from paths import ROOT, SUPPORT
from process_checks import is_gone
from waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("broker")]  # `broker` skips where none can be started

_PROBE = """
import os, select, signal, socket, sys
from doll.local.shared_memory import obstacle
from doll.process.platform import CAN_FORK
assert sys.platform == "darwin" and not CAN_FORK
assert not any(hasattr(*name) for name in ((os, "eventfd"), (select, "epoll"), (socket, "SO_PEERCRED")))
assert "No such file" in obstacle()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With a `redis-server` on PATH, as Homebrew installs it."""
    redis = find_executable()
    assert redis is not None
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "redis-server").symlink_to(redis)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DOLL_KAFKA", "DOLL_REDIS"))}
    return inherited | {"PATH": f"{programs}:{inherited['PATH']}", "PYTHONPATH": f"{ROOT}:{SUPPORT / 'darwin'}"}


def test_a_job_runs_without_what_macos_lacks(tmp_path: Path, environment: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", _PROBE], env=environment, check=True)
    command = [sys.executable, "-m", "doll", "up", "digits", "--parent-folder", str(tmp_path / "runs"), "--json"]
    command += ["--set", "stop.samples=3000", "--set", "control.kind=local"]
    with (tmp_path / "err").open("wb") as err:
        completed = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=err, check=False
        )
    said = (tmp_path / "err").read_text()
    assert completed.returncode == 0, said
    report = json.loads(completed.stdout)
    assert report["audit"]["ok"]
    assert report["restarts"] == 0
    assert "blobs: through Redis, because /dev/shm: No such file or directory" in said


def test_all_processes_end_with_a_job_that_is_killed(tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "doll", "up", "digits", "--parent-folder", str(tmp_path / "runs")]
    with (tmp_path / "err").open("wb") as err:
        up = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=err)

    def learns() -> bool:
        assert up.poll() is None, (tmp_path / "err").read_text()
        return any(int(path.stem[-10:]) > 0 for path in tmp_path.glob("runs/*/checkpoints/*.doll"))

    until(learns, lambda: f"the first checkpoint\n{(tmp_path / 'err').read_text()}")
    started = psutil.Process(up.pid).children(recursive=True)
    assert {"java", "redis-server"} <= {process.name() for process in started}
    up.send_signal(signal.SIGKILL)
    up.wait()
    until(
        lambda: all(map(is_gone, started)),
        lambda: f"the end of {[process for process in started if not is_gone(process)]}",
    )
