"""The handshake of a link between machines: who gets a link, and what happens to everybody else."""

from __future__ import annotations

import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from doll.errors import ConfigError
from doll.pipeline.links import tcp
from doll.pipeline.links.link import LinkClosedError, StageLink
from doll.pipeline.links.tcp import Address, Claim, Door, LinkRefusedError, connect, parse_address
from structlog.testing import capture_logs
from waiting import WAIT_TIMEOUT_S, until

SECRET = secrets.token_bytes(tcp.SECRET_BYTES)
CLAIM = Claim("job", 0, 1, "gang", True)
SILENT_S = 2 * WAIT_TIMEOUT_S


class Seats:
    """The places of one stage: a link to the worker, and one to the stage before."""

    def __init__(self) -> None:
        self.taken: list[Claim] = []

    def admit(self, claim: Claim) -> str:
        if claim.job != CLAIM.job:
            return f"expected job {CLAIM.job}, got {claim.job}"
        if any(claim.is_control == taken.is_control for taken in self.taken):
            return "the place is taken"
        self.taken.append(claim)
        return ""


@pytest.fixture
def make_door() -> Iterator[Callable[..., Door]]:
    doors: list[Door] = []

    def make(handshake_s: float = SILENT_S) -> Door:
        here, admit = Address("127.0.0.1", 0), Seats().admit
        doors.append(Door(here, lambda: SECRET, admit, silent_s=SILENT_S, handshake_s=handshake_s))
        return doors[-1]

    yield make
    for door in doors:
        door.close()


def link_at(door: Door) -> StageLink:
    return door.links.get(timeout=WAIT_TIMEOUT_S)[1]


def stranger(door: Door, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection((door.address.host, door.address.port), WAIT_TIMEOUT_S)
    connection.sendall(data)
    return connection


def is_ended(connection: socket.socket) -> bool:
    """Wait until the other end has closed the connection."""
    connection.settimeout(WAIT_TIMEOUT_S)
    try:
        while connection.recv(1024):
            pass
    except ConnectionError:
        pass
    return True


def test_a_link_carries_messages_in_both_directions(make_door: Callable[..., Door]) -> None:
    door = make_door()
    link = connect(door.address, SECRET, CLAIM, SILENT_S)
    claim, other = door.links.get(timeout=WAIT_TIMEOUT_S)
    assert claim == CLAIM
    for one, two in ((link, other), (other, link)):
        one.send(b"hello")
        assert two.receive() == (b"hello", [])
    assert door.refused == 0
    link.close()
    with pytest.raises(LinkClosedError):
        other.receive()
    other.close()


def test_who_does_not_know_the_secret_gets_no_link(make_door: Callable[..., Door]) -> None:
    door = make_door()
    with capture_logs() as logs, pytest.raises(LinkRefusedError, match="does not know the secret"):
        connect(door.address, b"x" * tcp.SECRET_BYTES, CLAIM, SILENT_S)
    until(lambda: door.refused == 1, "the count of refused connections")
    assert door.links.empty()
    assert SECRET.hex() not in repr(logs)


def test_a_claim_without_its_proof_is_refused(make_door: Callable[..., Door]) -> None:
    """A stranger that knows the form of the messages, and repeats the proof of the stage."""
    door = make_door()
    with capture_logs() as logs, stranger(door, b"dst1" + bytes(32)) as connection:
        connection.settimeout(None)  # with a limit, `recv` returns less
        answer = connection.recv(70, socket.MSG_WAITALL)
        text = b"\x95\xa3job\x00\x01\xa4gang\xc3"
        connection.sendall(struct.pack("<H", len(text)) + text + answer[38:])
        assert is_ended(connection)
        until(lambda: door.refused == 1, "the count of refused connections")
    assert "does not know the secret of this run" in logs[-1]["reason"]
    assert door.links.empty()


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n" + bytes(32), bytes(36), b"dst1" + bytes(32) + b"\xff\xff" + bytes(64), b"dst2" * 9],
    ids=["http", "zeros", "a claim beyond its limit", "another release"],
)
def test_bytes_that_are_no_handshake_are_refused_and_counted(make_door: Callable[..., Door], data: bytes) -> None:
    door = make_door()
    with stranger(door, data) as connection:
        assert is_ended(connection)
    until(lambda: door.refused == 1, "the count of refused connections")
    link = connect(door.address, SECRET, CLAIM, SILENT_S)
    link_at(door).close()
    link.close()


def test_a_place_is_given_once(make_door: Callable[..., Door]) -> None:
    door = make_door()
    first = connect(door.address, SECRET, CLAIM, SILENT_S)
    with pytest.raises(LinkRefusedError, match="the place is taken"):
        connect(door.address, SECRET, Claim("job", 0, 1, "another gang", True), SILENT_S)
    with pytest.raises(LinkRefusedError, match="expected job job, got other"):
        connect(door.address, SECRET, Claim("other", 0, 1, "gang", False), SILENT_S)
    until(lambda: door.refused == 2, "the count of refused connections")
    other = link_at(door)
    first.send(b"still there")
    assert other.receive()[0] == b"still there"
    for link in (first, other):
        link.close()


def test_a_connection_that_sends_nothing_ends_in_time(make_door: Callable[..., Door]) -> None:
    door = make_door(handshake_s=0.05)
    with stranger(door, b"d") as connection:
        assert is_ended(connection)
    until(lambda: door.refused == 1, "the count of refused connections")


def test_idle_connections_keep_nobody_away(make_door: Callable[..., Door]) -> None:
    door = make_door()
    idle = [stranger(door, b"dst1") for _ in range(3 * tcp.MAX_HANDSHAKES)]
    link = connect(door.address, SECRET, CLAIM, SILENT_S)
    link_at(door).close()
    link.close()
    assert is_ended(idle[0])
    for connection in idle:
        connection.close()


def test_a_server_that_does_not_know_the_secret_gets_no_claim() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(*server.getsockname())
        got: list[bytes] = []

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(36, socket.MSG_WAITALL)
                connection.sendall(b"dst1" + bytes(66))
                got.append(connection.recv(100))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(LinkRefusedError, match="does not know the secret of this run"):
            connect(address, SECRET, CLAIM, SILENT_S)
        thread.join(WAIT_TIMEOUT_S)
    assert got == [b""]


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(*server.getsockname())
    with pytest.raises(LinkRefusedError, match=r"no stage answers at 127\.0\.0\.1"):
        connect(address, SECRET, CLAIM, SILENT_S)


@pytest.mark.parametrize("address", [Address("127.0.0.1", 1 << 40), Address("a" * 300, 1), Address("\u2603..", 1)])
def test_an_impossible_address(address: Address) -> None:
    with pytest.raises(LinkRefusedError, match="no stage answers at"):
        connect(address, SECRET, CLAIM, SILENT_S)


def test_a_closed_door_refuses_and_its_links_stay(make_door: Callable[..., Door]) -> None:
    door = make_door()
    link = connect(door.address, SECRET, CLAIM, SILENT_S)
    other = link_at(door)
    door.close()
    door.close()
    with pytest.raises(LinkRefusedError):
        connect(door.address, SECRET, Claim("job", 0, 1, "gang", False), SILENT_S)
    link.send(b"on")
    assert other.receive()[0] == b"on"
    for end in (link, other):
        end.close()


def test_a_dead_machine_is_noticed_by_the_kernel(make_door: Callable[..., Door]) -> None:
    link = connect(make_door().address, SECRET, CLAIM, 8.0)
    with socket.socket(fileno=link.fileno()) as seen:
        assert seen.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
        assert seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 2
        seen.detach()
    link.close()


@pytest.mark.parametrize(
    ("text", "expected"), [("10.0.0.3:7400", Address("10.0.0.3", 7400)), ("host-1:0", Address("host-1", 0))]
)
def test_addresses(text: str, expected: Address) -> None:
    assert parse_address(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text", ["", ":7400", "host", "host:", "host:-1", "host:65536", "0.0.0.0:7400", "[::]:7400", "::1:7"]
)
def test_what_is_no_address_of_one_machine_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--listen: expected"):
        parse_address(text)


def test_an_address_that_this_machine_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"--listen: cannot listen at 192\.0\.2\.1:0"):
        Door(Address("192.0.2.1", 0), lambda: SECRET, lambda claim: "", silent_s=SILENT_S)


def test_a_door_that_closes_as_soon_as_a_link_is_taken_leaves_that_link(make_door: Callable[..., Door]) -> None:
    """The thread that has greeted it may not run again before the stage goes on."""
    door = make_door()
    taken: list[StageLink] = []
    closed = threading.Event()

    class TakenAtOnce(queue.SimpleQueue):  # type: ignore[type-arg]
        def put(self, item: tuple[Claim, StageLink], block: bool = True, timeout: float | None = None) -> None:
            taken.append(item[1])
            door.close()
            closed.set()

    door.links = TakenAtOnce()
    worker = connect(door.address, SECRET, CLAIM, SILENT_S)
    assert closed.wait(WAIT_TIMEOUT_S)
    worker.send(b"begin")
    assert taken[0].receive()[0] == b"begin"
    for end in (worker, taken[0]):
        end.close()
