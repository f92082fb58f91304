"""Children of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from doll_lab.drill.actions import children_of


def test_children_that_run_are_listed_oldest_first() -> None:
    made = [
        subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        listed = [pid for pid in children_of(os.getpid()) if pid in {process.pid for process in made}]
        assert listed == [process.pid for process in made]
        made[0].send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, made[0].pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked for its code
        assert made[0].pid not in children_of(os.getpid())
    finally:
        for process in made:
            process.kill()
            process.communicate()


def test_a_name_with_parentheses_and_spaces_is_read(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a ) 1 2) S 3 " + "0 " * 17 + "99 0")
    (tmp_path / "8").mkdir()  # has ended
    assert children_of(3, tmp_path) == [7]
    assert children_of(1, tmp_path) == []
