"""What differs between systems: here Linux's own calls, and what takes their place."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from doll.errors import ConfigError
from doll.local import launcher
from doll.process import platform
from doll.process.platform import WakeUp, lock_exclusively, peer_user, require_fork, sync
from process_checks import is_gone
from waiting import until


def test_a_wake_up_is_readable_from_set_to_clear_however_often_it_is_set() -> None:
    wake = WakeUp()
    with selectors.DefaultSelector() as selector:
        selector.register(wake, selectors.EVENT_READ)
        assert selector.select(0) == []
        assert not wake.clear()
        for _ in range(100_000):  # more than a pipe holds
            wake.set()
        assert len(selector.select(0)) == 1
        assert wake.clear()
        assert selector.select(0) == []
        threading.Thread(target=wake.set).start()
        assert len(selector.select(60)) == 1
    wake.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        wake.set()


def test_a_lock_is_for_one_process_and_ends_with_its_descriptor(tmp_path: Path) -> None:
    one, other = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    assert lock_exclusively(one)
    assert not lock_exclusively(other)
    os.close(one)
    assert lock_exclusively(other, wait=True)
    os.close(other)


def test_without_locks_the_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "fcntl", None)
    with pytest.raises(ConfigError, match="expected Linux or macOS"):
        lock_exclusively(0)
    with (tmp_path / "file").open("wb") as file:
        sync(file.fileno())


def test_the_user_at_the_other_end_is_known_by_either_call(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    with one, other:
        assert peer_user(one) == os.geteuid()

    class Darwin:
        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            assert (level, option, size) == (0, 1, 76)
            return struct.pack("=IIh2x16I", 0, 501, 1, *range(16))

    monkeypatch.delattr(socket, "SO_PEERCRED")
    assert peer_user(Darwin()) == 501  # type: ignore[arg-type]


def test_where_nothing_can_be_forked_a_pipeline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_fork()
    monkeypatch.setattr(platform, "CAN_FORK", False)
    with pytest.raises(ConfigError, match=r"worker\.pipeline: expected Linux"):
        require_fork()


_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-I", "-S", {launcher!r}, "--watch", str({pid}), "sleep", "600"])
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_watched_program_is_killed_when_its_parent_has_ended_and_its_watcher_ends_with_it() -> None:
    script = _PARENT.format(launcher=launcher.__file__, pid="__import__('os').getpid()")
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        program = psutil.Process(int(parent.stdout.readline()))
        until(lambda: program.name() == "sleep", "the program")
        (watcher,) = program.children()
        parent.kill()
    until(lambda: is_gone(program.pid) and is_gone(watcher.pid), "the end of both")


def test_a_program_whose_parent_is_another_process_is_not_started(tmp_path: Path) -> None:
    marker = tmp_path / "started"
    command = [sys.executable, "-I", "-S", launcher.__file__, "--watch", "1", "touch", str(marker)]
    assert subprocess.run(command, check=False).returncode == 1
    assert not marker.exists()
