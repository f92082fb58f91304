"""What every kind of control link must do, with the real socket or a real Redis; then what only one of them can."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from doll.consumers.channels.control_link import ControlLink
from doll.control.link_state import MAX_FRAME_BYTES, PING_EVERY_S, SILENCE_S, TO_WORKER, LinkError, LinkState
from doll.control.local_socket import LocalSocket, SocketLink, connect
from doll.control.redis_streams import StreamLink, server_stream
from doll.errors import ServiceUnavailableError
from doll.local.redis_server import LocalRedis
from doll.ps.channels.control_links import ControlLinks, LocalListener
from doll.ps.channels.stream_listener import StreamListener
from doll.records.control import (
    Alive,
    AnyRecord,
    Attach,
    Attached,
    Durable,
    Grant,
    Nack,
    NewVersion,
    Push,
    PushedBatch,
    Welcome,
    encode,
)
from doll.services import Services
from doll.storage.blobs import scope_of
from doll.storage.redis_client import connect_redis
from waiting import WAIT_TIMEOUT_S

pytestmark = pytest.mark.slow  # starts servers

TERM, SESSION = 3, (3 << 20) + 1
KINDS = ("local", "redis")


def welcome(worker: int = 0, session: int = SESSION, term: int = TERM, **more: Any) -> Welcome:
    return Welcome(
        term=term, worker=worker, process="me", session=session, origin=0, next_batch=0, fingerprint="f", **more
    )


def grant(number: int, worker: int = 0, session: int = SESSION) -> Grant:
    return Grant(
        term=TERM, worker=worker, session=session, first=number, grant_ids=(number,), version=1, min_version=1, key="w"
    )


def push(number: int, worker: int = 0, dead: tuple[int, ...] = ()) -> Push:
    batch = PushedBatch(batch=number, grant_id=number, n_samples=1, loss_sum=0.5, dead=dead)
    return Push(worker=worker, session=SESSION, term=TERM, version=1, key=f"g{number}", batches=(batch,))


class Clock:
    """The server's clock, which a test may put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Server:
    """`ControlLinks` of one kind."""

    def __init__(self, kind: str, services: Services, path: Path, term: int = TERM, run_id: str = "") -> None:
        self.term, self.clock, self.run_id = term, Clock(), run_id
        self.links = ControlLinks(term, self.clock, run_id=run_id)
        if kind == "local":
            self.links.add(LocalListener(self.links, LocalSocket(str(path), ""), max_links=8))
        else:
            self.links.add(StreamListener(self.links, services, scope_of("contract", run_id), term, max_links=8))
        self.records: list[AnyRecord] = []
        self.changed: list[int] = []

    def welcome(self, worker: int = 0, session: int = SESSION) -> Welcome:
        made = welcome(worker, session, self.term, endpoints=self.links.endpoints, run_id=self.run_id)
        self.links.welcome(made)
        return made

    def poll(self) -> None:
        self.links.poll(0.01)
        records, changed = self.take()
        self.records += records
        self.changed += changed

    def take(self) -> tuple[Sequence[AnyRecord], list[int]]:
        changed, records = self.links.take()
        return records, changed


@dataclass
class Worker:
    """A `ControlLink`, with what it was told."""

    link: ControlLink
    records: list[AnyRecord] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    async def run(self) -> None:
        await self.link.run(self.records.extend, lambda: self.changes.append(self.link.kind_in_use))

    async def attach(self, server: Server, until: Any) -> Welcome:
        """The server welcomes this process, which opens its first link."""
        self.link.welcome(made := server.welcome())
        await until(lambda: self.changes)
        return made


@dataclass
class Rig:
    kind: str
    services: Services
    path: Path
    servers: list[Server] = field(default_factory=list)

    def start_server(self, term: int = TERM) -> Server:
        self.servers.append(Server(self.kind, self.services, self.path, term))
        return self.servers[-1]

    def close(self) -> None:
        while self.servers:
            self.servers.pop().links.close()

    def worker(self) -> Worker:
        return Worker(ControlLink(self.services, self.kind))

    def raw(self) -> Any:
        """A worker's end without its logic."""
        endpoint = self.servers[-1].links.endpoints[0].partition(":")[2]
        now = time.monotonic()
        if self.kind == "local":
            return SocketLink(connect(endpoint), LinkState(TO_WORKER, now))
        return StreamLink(self.services, endpoint, now)

    def attached(self, server: Server) -> Any:
        """A worker's end without its logic, attached."""
        server.welcome()
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        records: list[AnyRecord] = []
        while True:
            raw = self.raw()
            try:
                raw.send(Attach(worker=0, session=SESSION, term=server.term), time.monotonic())
                while not records:
                    assert time.monotonic() < deadline_s
                    server.poll()
                    records = raw.receive(time.monotonic())
            except LinkError:  # the server's stream is not there yet
                raw.close()
            else:
                assert records == [Attached(term=server.term, worker=0, session=SESSION)]
                return raw


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    tmp_path.chmod(0o700)
    redis_url = request.getfixturevalue("redis_server").address if request.param == "redis" else ""
    with closing(Rig(request.param, Services("", redis_url), tmp_path / "s")) as made:
        yield made


ON_SOCKET = pytest.mark.parametrize("rig", ["local"], indirect=True)
ON_REDIS = pytest.mark.parametrize("rig", ["redis"], indirect=True)


def run(scenario: Callable[[Worker, Callable[..., Any]], Any], worker: Worker, *servers: Server) -> None:
    """Run `scenario(until)` on an event loop, with `worker` beside it."""

    async def main() -> None:
        task = asyncio.create_task(worker.run())

        async def until(condition: Callable[[], Any], *polled: Server) -> None:
            deadline_s = time.monotonic() + WAIT_TIMEOUT_S
            while not condition():
                assert not task.done(), task.exception()
                assert time.monotonic() < deadline_s
                for server in polled or servers:
                    await asyncio.to_thread(server.poll)

        try:
            await scenario(worker, until)
        finally:
            task.cancel()
            worker.link.close("the test ends")

    asyncio.run(main())


def test_grants_and_pushes_arrive_in_order_and_both_ends_know_of_the_link(rig: Rig) -> None:
    server, worker = rig.start_server(), rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        assert not worker.link.send(push(0)), "there is no link yet"
        assert not server.links.send(0, grant(0))
        await worker.attach(server, until)
        assert (worker.changes, server.changed) == ([rig.kind], [0])
        assert server.links.kinds() == {0: rig.kind}
        grants = [grant(number) for number in range(50)]
        new_version = NewVersion(term=TERM, worker=0, version=2, key="w")
        assert all(server.links.send(0, item) for item in grants)
        assert server.links.send(0, new_version)
        pushes = [push(number, dead=tuple(range(10**9, 10**9 + 50_000 * (number == 3)))) for number in range(50)]
        nack = Nack(worker=0, session=SESSION, batch=1, term=TERM, grant_id=1, reason="weights")
        assert all(worker.link.send(item) for item in pushes)
        assert worker.link.send(nack)
        await until(lambda: len(worker.records) > 50 and len(server.records) > 50)
        assert worker.records == [*grants, new_version]
        assert server.records == [*pushes, nack]

    run(scenario, worker, server)


def test_a_process_of_another_session_is_refused_until_it_is_welcomed(rig: Rig) -> None:
    server, worker = rig.start_server(), rig.worker()
    server.welcome(session=SESSION + 1)

    async def scenario(worker: Worker, until: Any) -> None:
        worker.link.welcome(welcome(endpoints=server.links.endpoints))
        await until(lambda: server.links.counters["refused_attach"])
        assert (worker.changes, server.changed) == ([], [])
        worker.link.welcome(server.welcome(session=SESSION + 1))
        await until(lambda: worker.changes)

    run(scenario, worker, server)


def test_a_welcome_of_a_later_process_ends_the_link_of_the_earlier_one(rig: Rig) -> None:
    server, worker = rig.start_server(), rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        server.welcome(session=SESSION + 1)
        assert server.links.kinds() == {}
        assert not server.links.send(0, grant(1, session=SESSION + 1)), "nobody of this session is attached"
        await until(lambda: worker.changes == [rig.kind, "kafka"])
        assert server.changed == [0, 0]

    run(scenario, worker, server)


def test_a_later_link_of_a_process_replaces_its_earlier_one(rig: Rig) -> None:
    """The worker noticed first that the earlier one was broken."""
    server, worker = rig.start_server(), rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        raw = rig.raw()
        await worker.attach(server, until)
        raw.send(Attach(worker=0, session=SESSION, term=TERM), time.monotonic())
        await until(lambda: len(worker.changes) == 2)
        assert server.changed[:2] == [0, 0]
        raw.close()

    run(scenario, worker, server)


def test_the_links_of_a_server_end_with_it_and_the_next_one_is_found(rig: Rig) -> None:
    first, worker = rig.start_server(), rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        late = await worker.attach(first, until)
        rig.close()
        second = rig.start_server(TERM + 1)
        await until(lambda: worker.changes == [rig.kind, "kafka"], second)
        assert not worker.link.send(push(0))
        worker.link.welcome(second.welcome())
        await until(lambda: worker.changes == [rig.kind, "kafka", rig.kind], second)
        assert not worker.link.send(push(0)), "a push of the earlier term is not for this server"
        worker.link.welcome(late)  # the first server was suspended, not dead
        assert worker.link.send(msgspec.structs.replace(push(0), term=TERM + 1))

    run(scenario, worker, first)


@pytest.fixture
def _no_second_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a link fails, the pause before the next attempt outlasts the test."""
    monkeypatch.setattr("doll.consumers.channels.control_link._RETRY_S", 10 * WAIT_TIMEOUT_S)


@pytest.mark.usefixtures("_no_second_attempt")
def test_a_new_server_that_ends_the_link_to_the_old_one_is_attached_to_at_once(rig: Rig) -> None:
    first, worker = rig.start_server(), rig.worker()
    rig.attached(first).close()  # it listens: the worker's only attempt succeeds
    rig.path = rig.path.with_name("new")
    second = rig.start_server(TERM + 1)
    rig.attached(second).close()

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(first, until)
        worker.link.welcome(second.welcome())  # the old server still answers: nothing else ends its link
        await until(lambda: len(worker.changes) == 3)
        assert worker.changes == [rig.kind, "kafka", rig.kind]
        assert worker.link.send(msgspec.structs.replace(push(0), term=TERM + 1))
        await until(lambda: second.records)

    run(scenario, worker, first, second)


def test_a_worker_that_leaves_closes_its_link(rig: Rig) -> None:
    server, worker = rig.start_server(), rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        worker.link.send(push(1))
        worker.link.close("leaving")
        await until(lambda: server.changed == [0, 0])
        assert server.records == [push(1)]

    run(scenario, worker, server)


def test_a_silent_worker_loses_its_link_and_a_ping_keeps_it(rig: Rig) -> None:
    server, worker = rig.start_server(), rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        kept_s = time.monotonic() + 1.5 * SILENCE_S
        await until(lambda: time.monotonic() > kept_s)
        assert server.links.kinds() == {0: rig.kind}
        server.clock.ahead_s = SILENCE_S + PING_EVERY_S
        server.links.poll(0.0)
        assert server.links.kinds() == {}

    run(scenario, worker, server)


@pytest.mark.parametrize(
    "record",
    [
        Durable(term=TERM, worker=0, until=3),
        grant(1),
        push(1, worker=1),
        Alive(worker=0, session=SESSION),
        Attach(worker=0, session=SESSION, term=TERM),
    ],
)
def test_what_does_not_belong_on_a_link_ends_it_and_is_counted(rig: Rig, record: AnyRecord) -> None:
    server = rig.start_server()
    raw = rig.attached(server)
    deadline_s = time.monotonic() + WAIT_TIMEOUT_S
    raw.send(record, time.monotonic())
    while server.links.kinds() and time.monotonic() < deadline_s:
        server.poll()
    assert server.links.kinds() == {}
    assert server.records == []
    assert server.changed == [0, 0]
    assert server.links.counters["control_refused"] + server.links.counters["refused_attach"] == 1
    raw.close()


# --- the socket ------------------------------------------------------------------------------------------------------


@pytest.fixture
def private(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


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
    """Whoever may write to the folder can put a socket of his own there."""
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
        with pytest.raises(LinkError, match=rf"to listen, got process {os.getpid()} of user {other - 1}") as error:
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


# --- two runs --------------------------------------------------------------------------------------------------------


def test_a_link_of_another_run_is_refused_by_the_server(rig: Rig) -> None:
    """Term and session of two runs of one job name are alike: both servers are the first of their run."""
    rig.servers.append(server := Server(rig.kind, rig.services, rig.path, run_id="aa"))
    made = msgspec.structs.replace(server.welcome(), run_id="bb")

    async def scenario(worker: Worker, until: Any) -> None:
        worker.link.welcome(made)
        await until(lambda: server.links.counters["refused_attach"])
        assert (worker.changes, server.links.kinds(), server.records) == ([], {}, [])

    run(scenario, rig.worker(), server)


def test_a_server_of_another_run_that_answers_is_refused_by_the_worker(rig: Rig) -> None:
    """It does not compare runs itself."""
    rig.servers.append(server := Server(rig.kind, rig.services, rig.path, run_id="aa"))
    refused: list[int] = []
    worker = Worker(ControlLink(rig.services, rig.kind, on_refused=refused.append))

    def answer_anybody(peer: Any, record: Attach) -> None:
        peer.link.send(Attached(term=TERM, worker=0, session=SESSION, run_id="aa"), server.clock())

    server.links._attach = answer_anybody  # type: ignore[method-assign]

    async def scenario(worker: Worker, until: Any) -> None:
        worker.link.welcome(msgspec.structs.replace(server.welcome(), run_id="bb"))
        await until(lambda: refused)
        assert (worker.changes, worker.link.kind_in_use) == ([], "kafka")

    run(scenario, worker, server)


@ON_REDIS
def test_two_runs_of_one_job_name_on_one_redis_keep_to_themselves(rig: Rig) -> None:
    rig.servers += (
        (mine := Server("redis", rig.services, rig.path, run_id="aa")),
        (other := Server("redis", rig.services, rig.path, run_id="bb")),
    )
    assert mine.links.endpoints != other.links.endpoints
    other.welcome()  # worker 0 of the other run has the same session

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(mine, until)
        assert worker.link.send(push(1))
        await until(lambda: mine.records)
        assert (mine.records, mine.links.kinds()) == ([push(1)], {0: "redis"})
        assert (other.records, other.links.kinds(), dict(other.links.counters)) == ([], {}, {})

    run(scenario, rig.worker(), mine, other)


# --- Redis -----------------------------------------------------------------------------------------------------------


@ON_REDIS
def test_streams_are_trimmed_expire_and_are_gone_with_their_ends(rig: Rig, redis_client: Any) -> None:
    server, worker = rig.start_server(), rig.worker()
    name = server_stream("contract", TERM)

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        for number in range(500):
            worker.link.send(push(number))
            server.links.send(0, grant(number))
        await until(lambda: len(server.records) == len(worker.records) == 500)
        keys = [key.decode() for key in redis_client.keys(f"{name}*")]
        assert len(keys) == 2
        assert all(0 < redis_client.ttl(key) <= 60 for key in keys)
        await until(lambda: all(redis_client.xlen(key) <= 3 for key in keys))

    run(scenario, worker, server)
    rig.close()
    assert redis_client.keys(f"{name}*") == []


@ON_REDIS
@pytest.mark.parametrize(
    "damage", ["wipe", "server_stream", "other_type", "lost_entry", "foreign_entry", "garbled_entry"]
)
def test_a_redis_that_loses_entries_breaks_the_link_which_comes_back(rig: Rig, redis_client: Any, damage: str) -> None:
    server, worker = rig.start_server(), rig.worker()
    name = server_stream("contract", TERM)

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        link = next(key for key in redis_client.keys(f"{name}:*"))
        match damage:
            case "wipe":
                redis_client.flushall()
            case "server_stream":
                redis_client.delete(name)
            case "lost_entry":  # as a failover to a replica that lags
                state = LinkState(TO_WORKER, 0.0)
                for _ in range(5):
                    frame = state.pack(grant(1), 0.0)
                redis_client.xadd(link, {"f": frame})
            case "other_type":  # the server's stream has become a string
                redis_client.set(name, b"text")
            case "garbled_entry":
                redis_client.xadd(link, {"f": b"\0\0\0\1\xff\xff"})
            case "foreign_entry":
                redis_client.xadd(link, {"what": "ever"})
        await until(lambda: worker.changes == ["redis", "kafka", "redis"])
        assert server.changed[:3] == [0, 0, 0]
        assert worker.link.send(push(7))
        await until(lambda: server.records == [push(7)])

    run(scenario, worker, server)


@ON_REDIS
def test_a_foreign_entry_for_the_server_is_counted_and_harms_no_link(rig: Rig, redis_client: Any) -> None:
    server, worker = rig.start_server(), rig.worker()
    name = server_stream("contract", TERM)

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        redis_client.xadd(name, {"what": "ever"})
        redis_client.xadd(name, {"l": "unknown", "f": b"\0\0\0\0" + encode(push(1))})
        redis_client.xadd(name, {"l": "../etc", "f": b""})
        redis_client.xadd(name, {"": ""})  # as the entry that a stream begins with
        redis_client.xadd(name, {"l": "x" * 65, "f": b""})
        redis_client.xadd(name, {"l": "unknown", "f": bytes(MAX_FRAME_BYTES + 1)})
        await until(lambda: server.links.counters["control_refused"] == 4)
        assert worker.link.send(push(7))
        await until(lambda: server.records == [push(7)])
        assert worker.changes == ["redis"]

    run(scenario, worker, server)


def test_a_redis_that_restarts_empty_breaks_all_links_and_they_come_back(own_redis: LocalRedis) -> None:
    rig = Rig("redis", Services("", own_redis.address), Path())
    server, worker = rig.start_server(), rig.worker()

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        own_redis.kill()
        await until(lambda: worker.changes[-1] == "kafka" and server.links.kinds() == {})
        own_redis.start()
        await until(lambda: worker.changes[-1] == "redis")
        assert worker.link.send(push(7))
        await until(lambda: server.records == [push(7)])

    with closing(rig):
        run(scenario, worker, server)


def test_auto_takes_the_socket_then_redis_and_goes_back(redis_server: LocalRedis, private: Path) -> None:
    services = Services("", redis_server.address)
    rig = Rig("local", services, private / "s")
    server, worker = rig.start_server(), Worker(ControlLink(services, "auto"))
    server.links.add(StreamListener(server.links, services, "contract", TERM, max_links=8))

    async def scenario(worker: Worker, until: Any) -> None:
        await worker.attach(server, until)
        assert worker.changes == ["local"]
        os.rename(private / "s", private / "away")
        server.links.welcome(welcome(session=SESSION + 1))
        server.links.welcome(welcome())
        await until(lambda: worker.changes == ["local", "kafka", "redis"])
        os.rename(private / "away", private / "s")
        await until(lambda: worker.changes[3:] == ["local"])

    with closing(rig):
        run(scenario, worker, server)


def test_a_redis_that_takes_connections_and_refuses_commands_is_asked_with_pauses(own_redis: LocalRedis) -> None:
    services = Services("", own_redis.address)
    client: Any = connect_redis(services)
    client.execute_command("ACL", "SETUSER", "default", "-xread")
    before = client.info()["total_connections_received"]
    server = Server("redis", services, Path())
    until_s = time.monotonic() + 1.2
    while time.monotonic() < until_s:
        server.poll()
    server.links.close()
    # Two connections at 0, 0.5 and 1.5 s. Without a pause there were thousands.
    assert 2 <= client.info()["total_connections_received"] - before <= 6
    client.close()


def test_a_redis_that_nobody_serves_is_waited_for(nowhere: Services) -> None:
    server = Server("redis", nowhere, Path())
    server.poll()
    server.links.close()
    with pytest.raises(redis.ConnectionError):
        connect_redis(nowhere, retries=0).ping()
