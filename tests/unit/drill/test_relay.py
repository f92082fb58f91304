"""A relay passes everything on unchanged, and cut, nothing: silently or with resets, until it is mended."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from collections.abc import Iterator

import pytest
from doll.drill.relay import Relay, Relays

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


@pytest.fixture
def relay() -> Iterator[Relay]:
    """Leads to a server that says back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server, Relays() as relays:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        relay = relays.open()
        relay.target_port = server.getsockname()[1]
        yield relay
        server.shutdown(socket.SHUT_RDWR)


def connect(relay: Relay) -> socket.socket:
    return socket.create_connection(("127.0.0.1", relay.port), timeout=WAIT_TIMEOUT_S)


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


def test_a_silent_cut_holds_back_what_is_sent_until_it_is_mended(relay: Relay) -> None:
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
        with pytest.raises(ConnectionResetError):
            before.recv(4)
    # It resets what the kernel takes in: while connecting, or at the first byte.
    with pytest.raises((ConnectionResetError, BrokenPipeError)), connect(relay) as during:  # noqa: PT012
        during.sendall(b"ping")
        during.recv(4)
    relay.restore()
    with connect(relay) as after:
        assert_answers(after)


def test_relays_are_cut_one_by_one_and_a_target_that_is_away_resets(relay: Relay) -> None:
    with Relays() as others:
        other = others.open()
        with pytest.raises((ConnectionResetError, BrokenPipeError)), connect(other) as nowhere:  # noqa: PT012
            nowhere.sendall(b"ping")
            nowhere.recv(4)
        other.target_port = relay.port
        other.start_cut("reset")
        with connect(relay) as connection:
            assert_answers(connection)
        other.restore()
        with connect(other) as connection:
            assert_answers(connection)
        port = other.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_TIMEOUT_S)
