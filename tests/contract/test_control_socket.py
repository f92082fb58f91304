"""What a control link by a Unix socket does besides the contract: bytes of strangers, limits, folders and users."""

from __future__ import annotations

import os
import resource
import socket
import stat
import struct
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from control_rig import ON_SOCKET, SESSION, TERM, Rig, Worker, run
from doll.consumers.channels.control_link import ControlLink
from doll.control.link_state import MAX_FRAME_BYTES, PING_EVERY_S, SILENCE_S, TO_WORKER, LinkError, LinkState
from doll.control.local_socket import LocalSocket, SocketLink, connect
from doll.errors import ServiceUnavailableError
from doll.records.control import (
    Attach,
)
from doll.services import Services
from waiting import WAIT_TIMEOUT_S

pytestmark = pytest.mark.slow  # starts servers


@ON_SOCKET
@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 100,
        struct.pack(">I", 2**32 - 1),  # nothing of 4 GB is waited for
        struct.pack(">I", 0),
        struct.pack(">I", 3) + b"abc",
        struct.pack(">I", 20) + b"\0" * 20,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_bytes_that_are_no_frames_end_a_connection_and_no_other(rig: Rig, data: bytes) -> None:
    server = rig.start_server()
    other = connect(str(rig.path))
    link = SocketLink(other, LinkState(TO_WORKER, time.monotonic()))
    server.welcome()
    link.send(Attach(worker=0, session=SESSION, term=TERM), time.monotonic())
    with connect(str(rig.path)) as connection:
        connection.sendall(data)
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        while not server.links.counters["control_refused"] and time.monotonic() < deadline_s:
            server.poll()
    assert server.links.counters["control_refused"] == 1
    assert server.links.kinds() == {0: "local"}
    link.close()


@ON_SOCKET
def test_a_connection_that_does_not_say_who_it_is_is_closed(rig: Rig) -> None:
    server = rig.start_server()
    with connect(str(rig.path)) as connection:
        server.poll()
        server.clock.ahead_s = SILENCE_S + PING_EVERY_S
        server.poll()
        server.poll()
        while connection.recv(1 << 16):  # a Detach, then the end
            continue


@ON_SOCKET
def test_connections_of_a_foreign_process_are_bounded_and_closed_and_workers_attach_again(rig: Rig) -> None:
    server = rig.start_server()
    foreign = [connect(str(rig.path)) for _ in range(20)]
    worker = rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        for _ in range(30):
            server.poll()
        assert len(server.links.selector.get_map()) == 1 + 8, "the listening socket and `max_links` connections"
        worker.link.welcome(server.welcome())
        server.clock.ahead_s = SILENCE_S + PING_EVERY_S
        await until(lambda: worker.changes == ["local"])
        assert server.links.counters["control_refused"] + server.links.counters["control_broken"] == 8

    try:
        run(scenario, worker, server)
    finally:
        for connection in foreign:
            connection.close()


@ON_SOCKET
def test_a_server_without_descriptors_does_not_spin_and_takes_the_worker_later(rig: Rig) -> None:
    server = rig.start_server()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connect(str(rig.path)) as connection:
        os.close(lowest_free := os.dup(connection.fileno()))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
            server.poll()
            assert server.links.selector.select(0.0) == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        server.clock.ahead_s += 1.0
        server.poll()  # its check listens again
        assert server.links.selector.select(WAIT_TIMEOUT_S), "the worker still waits"


@ON_SOCKET
def test_an_endless_frame_is_not_kept(rig: Rig) -> None:
    """A frame of the greatest length that is announced and never ends: it is given up as silence."""
    server = rig.start_server()
    with connect(str(rig.path)) as connection:
        connection.sendall(struct.pack(">I", MAX_FRAME_BYTES) + bytes(1000))
        server.poll()
        server.poll()
        assert not server.links.counters
        server.clock.ahead_s = SILENCE_S + PING_EVERY_S
        server.poll()
        assert server.links.counters["control_broken"] + server.links.counters["control_refused"] == 1


@pytest.mark.usefixtures("_no_second_attempt")
def test_a_new_server_that_comes_while_a_link_to_the_old_one_opens_is_attached_to_at_once(private: Path) -> None:
    rig = Rig("local", Services("", ""), private / "old")
    first, worker = rig.start_server(), rig.worker()
    rig.path = private / "new"
    second = rig.start_server(TERM + 1)

    async def scenario(worker: Worker, until: Any) -> None:
        worker.link.welcome(first.welcome())
        await until(lambda: first.links.selector.select(0.0), second)  # it has connected, and no answer has come
        worker.link.welcome(second.welcome())
        await until(lambda: second.changed)
        await until(lambda: worker.changes)
        assert (worker.changes, first.changed, second.changed) == (["local"], [0, 0], [0])

    with closing(rig):
        run(scenario, worker, first, second)


def test_the_socket_of_a_killed_server_is_taken_over_and_an_ended_one_keeps_its_successors(private: Path) -> None:
    path = private / "s"
    killed = socket.socket(socket.AF_UNIX)
    killed.bind(str(path))
    killed.close()  # its file stays
    first = LocalSocket(str(path), "")
    second = LocalSocket(str(path), "")
    first.close()
    connect(str(path)).close()
    second.close()
    assert list(private.iterdir()) == []


def test_a_folder_that_others_may_enter_is_refused(private: Path) -> None:
    private.chmod(0o755)
    with pytest.raises(ServiceUnavailableError, match="nobody else may enter"):
        LocalSocket(str(private / "s"), "")


def test_a_worker_attaches_to_no_socket_in_a_folder_that_others_may_enter(private: Path) -> None:
    """A user who may write to the folder can put a socket there."""
    rig = Rig("local", Services("", ""), private / "s")
    server = rig.start_server()
    private.chmod(0o770)
    refused: list[int] = []
    worker = Worker(ControlLink(Services("", ""), "local", on_refused=refused.append))

    async def scenario(worker: Worker, until: Any) -> None:
        worker.link.welcome(server.welcome())
        await until(lambda: len(refused) == 2)
        assert (worker.link.kind_in_use, worker.changes, server.links.kinds()) == ("kafka", [], {})
        private.chmod(0o700)
        await until(lambda: worker.changes)
        assert worker.changes == ["local"]

    with closing(rig):
        run(scenario, worker, server)
    assert refused[:2] == [1, 2]


def test_a_connection_to_a_folder_a_file_or_a_link_that_is_not_this_users_is_refused(private: Path) -> None:
    (real := private / "real").mkdir(0o700)
    listening = LocalSocket(str(real / "s"), "")
    (private / "folder").symlink_to(real)
    (real / "linked").symlink_to(real / "s")
    (real / "file").touch()
    try:
        for path, reason in (
            (private / "folder" / "s", r"folder: expected a folder of user \d+ that nobody else may enter, got mode l"),
            (real / "linked", r"linked: expected a socket of user \d+, got mode l"),
            (real / "file", r"file: expected a socket of user \d+, got mode -"),
        ):
            with pytest.raises(LinkError, match=reason) as error:
                connect(str(path))
            assert error.value.is_refusal
        with pytest.raises(LinkError, match="cannot connect") as error:  # on another machine
            connect(str(private / "nowhere" / "s"))
        assert not error.value.is_refusal
        connect(str(real / "s")).close()
    finally:
        listening.close()


def test_a_process_of_another_user_that_listens_is_refused(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder and socket are this user's when they are looked at; who listens is another user's process."""
    listening = LocalSocket(str(private / "s"), "")
    real, path = os.lstat, str(private / "s")
    other = os.geteuid() + 1

    def lstat(name: Any) -> Any:
        status = real(name)
        return os.stat_result([*status[:4], other, *status[5:10]])

    monkeypatch.setattr(os, "lstat", lstat)
    monkeypatch.setattr(os, "geteuid", lambda: other)
    try:
        with pytest.raises(LinkError, match=rf"to listen, got one of user {other - 1}") as error:
            connect(path)
        assert error.value.is_refusal
    finally:
        listening.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to listen as another user")
def test_a_socket_of_another_user_is_refused(private: Path) -> None:
    """Another user has made the folder and listens in it."""
    (folder := private / "theirs").mkdir(0o700)
    listening = socket.socket(socket.AF_UNIX)
    with closing(listening):
        listening.bind(str(folder / "s"))
        listening.listen()
        for owned, reason in ((folder / "s", "expected a socket of user 0"), (folder, "expected a folder of user 0")):
            os.chown(owned, 65534, 65534)
            with pytest.raises(LinkError, match=reason) as error:
                connect(str(folder / "s"))
            assert error.value.is_refusal


def test_a_path_that_no_socket_can_have_is_refused(private: Path) -> None:
    with pytest.raises(ServiceUnavailableError, match="at most 100 bytes"):
        LocalSocket(str(private / ("s" * 100)), "")


def test_a_chosen_path_is_the_jobs_own_in_a_private_folder(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(private))
    one, other = LocalSocket("", "kafka:1 job"), LocalSocket("", "kafka:1 other")
    try:
        assert one.path != other.path
        assert stat.S_IMODE(os.stat(one.path.parent).st_mode) == 0o700
    finally:
        one.close()
        other.close()
