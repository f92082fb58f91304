"""Forked roles: how they start, end and fail, and that they end with their server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from doll.errors import ServiceUnavailableError
from doll.local.forks import ForkServer
from doll.local.supervisor import RoleSpec, Supervisor
from paths import SUPPORT
from process_checks import is_gone
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.slow  # starts servers

SAMPLES = "role_samples"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server with nothing heavy loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SUPPORT))
        with ForkServer(tmp_path_factory.mktemp("fork") / "server.log", preload=["json", "no_such_module"]) as server:
            yield server


def test_a_role_is_a_child_of_the_server_with_signals_of_its_own(server: ForkServer, tmp_path: Path) -> None:
    facts = tmp_path / "facts"
    role = server.start_role(
        f"{SAMPLES}:report", [str(facts)], log_path=tmp_path / "r.log", name="r", env={"SAMPLE": "seen"}
    )
    assert role.wait(WAIT_TIMEOUT_S) == 7
    pid, parent, session, int_ignored, term_default, sample, torch_loaded = facts.read_text().split()
    assert (int(pid), int(parent), int(session)) == (role.pid, server.pid, role.pid)
    assert (int_ignored, term_default, sample, torch_loaded) == ("True", "True", "seen", "False")
    assert "SAMPLE" not in os.environ


def test_what_a_role_says_goes_to_its_log(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "deep" / "r.log"
    role = server.start_role(f"{SAMPLES}:speak", ["to out\n", "to err\n"], log_path=log, name="r")
    assert role.wait(WAIT_TIMEOUT_S) == 0
    assert sorted(log.read_text().splitlines()) == ["to err", "to out"]


@pytest.mark.parametrize(
    ("target", "args", "code", "words"),
    [
        (f"{SAMPLES}:fail", [], 1, "RuntimeError: this role has failed"),
        ("no_such_package:main", [], 1, "No module named 'no_such_package'"),
        (f"{SAMPLES}:missing", [], 1, "has no attribute 'missing'"),
        ("sys:exit", [3], 3, ""),
        ("sys:exit", [], 0, ""),
        ("sys:exit", ["good-bye"], 1, "good-bye"),
    ],
)
def test_the_end_of_a_role_is_its_exit_code_and_its_reason_is_in_the_log(
    server: ForkServer, tmp_path: Path, target: str, args: list[object], code: int, words: str
) -> None:
    log = tmp_path / "r.log"
    assert server.start_role(target, args, log_path=log, name="r").wait(WAIT_TIMEOUT_S) == code
    assert words in log.read_text()


def test_terminate_and_kill_end_a_role_and_may_be_repeated(server: ForkServer, tmp_path: Path) -> None:
    for end, code in (("terminate", -signal.SIGTERM), ("kill", -signal.SIGKILL)):
        role = server.start_role("time:sleep", [600], log_path=tmp_path / "r.log", name="r")
        assert role.poll() is None
        assert role.wait(0.01) is None
        getattr(role, end)()
        assert role.wait(WAIT_TIMEOUT_S) == code
        getattr(role, end)()
        assert role.exitcode == code


def test_roles_that_end_out_of_order_are_told_apart(server: ForkServer, tmp_path: Path) -> None:
    slow = server.start_role("time:sleep", [600], log_path=tmp_path / "a.log", name="a")
    quick = [server.start_role("sys:exit", [n], log_path=tmp_path / "b.log", name=f"b{n}") for n in range(1, 6)]
    assert [role.wait(WAIT_TIMEOUT_S) for role in quick] == [1, 2, 3, 4, 5]
    assert slow.poll() is None
    slow.kill()
    assert slow.wait(WAIT_TIMEOUT_S) == -signal.SIGKILL


def test_the_supervisor_restarts_a_killed_role(server: ForkServer, tmp_path: Path) -> None:
    supervisor = Supervisor(server.launch)
    first = supervisor.start(RoleSpec("r", "time:sleep", tmp_path / "r.log", [600]))
    first.kill()

    def replaced() -> bool:
        supervisor.poll()
        return supervisor.handles().get("r") not in (None, first)

    until(replaced, "a new process for the role")
    assert psutil.pid_exists(supervisor.handles()["r"].pid)
    supervisor.stop()
    assert supervisor.handles() == {}


def test_roles_end_with_their_server_and_the_next_start_says_why_it_cannot(tmp_path: Path) -> None:
    with ForkServer(tmp_path / "server.log", preload=[]) as server:
        role = server.start_role("time:sleep", [600], log_path=tmp_path / "r.log", name="r")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        assert role.wait(WAIT_TIMEOUT_S) == -signal.SIGKILL
        until(lambda: is_gone(role.pid), "the role's end")
        with pytest.raises(ServiceUnavailableError, match="cannot start late"):
            server.start_role("time:sleep", [1], log_path=tmp_path / "r.log", name="late")


def test_close_ends_the_server_and_all_roles(tmp_path: Path) -> None:
    with ForkServer(tmp_path / "server.log", preload=[]) as server:
        role = server.start_role("time:sleep", [600], log_path=tmp_path / "r.log", name="r")
        server_pid = server.pid
    assert role.exitcode == -signal.SIGKILL
    until(lambda: is_gone(role.pid), "the role's end")
    assert server_pid is not None
    assert is_gone(server_pid)
