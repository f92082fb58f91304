"""External processes: they log to their file, are in a session of their own, and end when told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from doll.local import launcher, processes
from waiting import WAIT_TIMEOUT_S, until


def python(code: str, log_path: Path, **options: object) -> subprocess.Popen[bytes]:
    return processes.spawn([sys.executable, "-c", code], log_path, **options)  # type: ignore[arg-type]


def test_output_is_appended_to_the_log_and_the_environment_is_ours_and_more(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "server.log"
    code = (
        "import os, sys; print(os.environ['EXTRA']); sys.stdout.flush(); print('HOME' in os.environ, file=sys.stderr)"
    )
    for _ in range(2):
        assert python(code, log, env={"EXTRA": "more"}).wait(WAIT_TIMEOUT_S) == 0
    assert log.read_text() == "more\nTrue\n" * 2


def test_a_spawned_program_leads_a_session_of_its_own(tmp_path: Path) -> None:
    process = python("import os; print(os.getsid(0), os.getpid(), os.getppid())", tmp_path / "log")
    assert process.wait(WAIT_TIMEOUT_S) == 0
    session, pid, parent = map(int, (tmp_path / "log").read_text().split())
    assert session == pid == process.pid  # so the terminal's Ctrl-C does not reach it
    assert parent == os.getpid()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="without --watch it needs Linux's death signal")
def test_a_program_whose_parent_is_another_does_not_start(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(launcher.__file__), "1", "touch", str(marker)],
        check=False,
        timeout=WAIT_TIMEOUT_S,
    )
    assert done.returncode == 1
    assert not marker.exists()


def is_ready(log: Path) -> bool:
    return "ready" in processes.tail(log)


def test_end_is_gentle_first_then_firm(tmp_path: Path) -> None:
    ready = "import signal; print('ready', flush=True); signal.pause()"
    gentle = python(ready, tmp_path / "gentle")
    stubborn = python(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {ready}", tmp_path / "stubborn")
    for log in ("gentle", "stubborn"):
        until(partial(is_ready, tmp_path / log), f"the {log} one to be ready")
    assert processes.end(gentle, grace_s=WAIT_TIMEOUT_S) == -signal.SIGTERM
    assert processes.end(stubborn, grace_s=0.1) == -signal.SIGKILL
    assert processes.end(stubborn, grace_s=0.1) == -signal.SIGKILL


def test_a_free_port_can_be_listened_on() -> None:
    port = processes.free_port()
    with socket.socket() as listener:
        listener.bind((processes.LOOPBACK, port))
        listener.listen()


def test_a_port_that_is_taken_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind((processes.LOOPBACK, 0))
        listener.listen()
        taken = listener.getsockname()[1]
        monkeypatch.setattr(processes, "_PORTS", range(taken, taken + 200))
        assert processes.free_port() != taken


@pytest.mark.parametrize(
    ("content", "shown"),
    [(b"1\n2\n3\n", "2\n3"), (b"", "(its log is empty)"), (b"\xff\n", "\ufffd"), (b"x" * 50_000, "x" * 16_384)],
)
def test_tail_shows_the_last_lines(tmp_path: Path, content: bytes, shown: str) -> None:
    (tmp_path / "log").write_bytes(content)
    assert processes.tail(tmp_path / "log", lines=2) == shown


def test_tail_of_a_missing_log_says_so(tmp_path: Path) -> None:
    assert processes.tail(tmp_path / "none") == "(no log)"


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "killed by SIGKILL"), (-250, "killed by signal 250")],
)
def test_exit_text(code: int, text: str) -> None:
    assert processes.describe_exit(code) == text


def test_a_server_that_asks_for_several_ports_gets_different_ones() -> None:
    ports = [processes.free_port() for _ in range(500)]
    assert len(set(ports)) == len(ports)
