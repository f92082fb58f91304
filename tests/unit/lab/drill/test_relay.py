"""A relay passes everything on unchanged, and cut, nothing: silently or with resets, until it is restored."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from doll_lab.drill.relay import Relay, Relays, TcpRelay, UnixRelay

WAIT_TIMEOUT_S = 60.0  # only bounds a failure
SILENCE_S = 0.3


def echo(server: socket.socket) -> None:
    """Say back what comes, on each connection, until its peer has finished."""

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while data := connection.recv(65_536):
                connection.sendall(data)

    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()


def listen(kind: str, folder: Path) -> socket.socket:
    if kind == "tcp":
        return socket.create_server(("127.0.0.1", 0))
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "service.sock"))
    server.listen()
    return server


@pytest.fixture(params=["tcp", "unix"])
def relay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Relay]:
    """Leads to a server that says back what it gets."""
    with listen(request.param, tmp_path) as server, Relays() as relays:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        relay: Relay
        if request.param == "tcp":
            relay = tcp = relays.open()
            tcp.target_port = server.getsockname()[1]
        else:
            relay = relays.open_unix(tmp_path / "relay.sock", tmp_path / "service.sock")
        yield relay
        server.shutdown(socket.SHUT_RDWR)


def connect(relay: Relay) -> socket.socket:
    if isinstance(relay, TcpRelay):
        return socket.create_connection(("127.0.0.1", relay.port), timeout=WAIT_TIMEOUT_S)
    assert isinstance(relay, UnixRelay)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(WAIT_TIMEOUT_S)
    try:
        connection.connect(str(relay.path))
    except BaseException:
        connection.close()
        raise
    return connection


def assert_ends(connection: socket.socket) -> None:
    """TCP connections are reset; Unix sockets have no reset, and are closed."""
    try:
        connection.sendall(b"ping")
        assert connection.recv(4) == b""
    except (ConnectionResetError, BrokenPipeError):
        return
    assert connection.family == socket.AF_UNIX


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def assert_answers(connection: socket.socket) -> None:
    connection.sendall(b"ping")
    assert connection.recv(4) == b"ping"


def test_it_passes_on_megabytes_and_the_end_of_each_side(relay: Relay) -> None:
    sent = bytes(range(256)) * 40_000  # more than all buffers on the way hold
    with connect(relay) as connection:
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(read_all(connection)))
        reader.start()
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        reader.join(WAIT_TIMEOUT_S)
    assert hashlib.sha256(got[0]).digest() == hashlib.sha256(sent).digest()


@pytest.mark.slow
def test_a_silent_cut_holds_back_what_is_sent_until_it_is_restored(relay: Relay) -> None:
    with connect(relay) as before:
        assert_answers(before)
        relay.start_cut("silent")
        with connect(relay) as during:  # the kernel takes it in; nobody answers, as where packets are lost
            for connection in (before, during):
                connection.settimeout(SILENCE_S)
                connection.sendall(b"late")
                with pytest.raises(TimeoutError):
                    connection.recv(4)
                connection.settimeout(WAIT_TIMEOUT_S)
            relay.restore()
            assert before.recv(4) == b"late"
            assert during.recv(4) == b"late"


def test_a_hard_cut_resets_old_and_new_connections(relay: Relay) -> None:
    with connect(relay) as before:
        assert_answers(before)
        relay.start_cut("reset")
        assert_ends(before)
    # It resets what the kernel takes in: while connecting, or at the first byte.
    with contextlib.suppress(ConnectionResetError), connect(relay) as during:
        assert_ends(during)
    relay.restore()
    with connect(relay) as after:
        assert_answers(after)


def test_a_removed_socket_ends_connections_and_takes_none_until_it_is_back(relay: Relay) -> None:
    if isinstance(relay, TcpRelay):
        with pytest.raises(ValueError, match="TcpRelay"):
            relay.start_cut("removed")
        relay.restore()
    else:
        with connect(relay) as before:
            assert_answers(before)
            relay.start_cut("removed")
            assert_ends(before)
        with pytest.raises(FileNotFoundError):
            connect(relay)
        relay.restore()
        relay.restore()
    with connect(relay) as after:
        assert_answers(after)


def test_a_service_that_is_away_ends_connections(tmp_path: Path) -> None:
    with Relays() as relays:
        nowhere: Relay
        for nowhere in (relays.open(), relays.open_unix(tmp_path / "relay.sock", tmp_path / "nobody.sock")):
            with contextlib.suppress(ConnectionResetError), connect(nowhere) as connection:
                assert_ends(connection)


def test_relays_are_cut_one_by_one(tmp_path: Path) -> None:
    with listen("tcp", tmp_path) as server, Relays() as relays:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        one, other = relays.open(), relays.open()
        one.target_port = other.target_port = server.getsockname()[1]
        other.start_cut("reset")
        with connect(one) as connection:
            assert_answers(connection)
        port = one.port
        server.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_TIMEOUT_S)
