"""A slow relay passes everything on, and takes its time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from benchmarks.live.slow_network import SlowRelay

from doll_lab.drill.relay import Relays

pytestmark = pytest.mark.slow  # seconds of waiting

WAIT_TIMEOUT_S = 60.0  # only bounds a failure


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
def relay() -> Iterator[SlowRelay]:
    """Leads to a server that says back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server, Relays() as relays:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        relay = relays.make(SlowRelay)
        relay.target_port = server.getsockname()[1]
        yield relay
        server.shutdown(socket.SHUT_RDWR)


def connect(relay: SlowRelay) -> socket.socket:
    return socket.create_connection(("127.0.0.1", relay.port), timeout=WAIT_TIMEOUT_S)


def test_a_slow_link_takes_its_time_in_each_direction_for_all_connections_together(relay: SlowRelay) -> None:
    relay.bytes_per_s = 4e6
    sent = bytes(500_000)
    with connect(relay) as one, connect(relay) as other:
        threads = [threading.Thread(target=connection.sendall, args=(sent,)) for connection in (one, other)]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        for connection in (one, other):
            left = len(sent)
            while left:
                left -= len(connection.recv(min(left, 1 << 16)))
        took_s = time.monotonic() - began_s
        for thread in threads:
            thread.join(WAIT_TIMEOUT_S)
    assert took_s >= 2 * len(sent) / relay.bytes_per_s


def test_a_long_link_delays_each_piece_and_not_the_one_behind_it(relay: SlowRelay) -> None:
    relay.delay_s = 0.2
    sent = b"".join(bytes([number]) * (1 << 16) for number in range(120))  # at least 30 reads of the relay
    with connect(relay) as connection:
        began_s = time.monotonic()
        sender = threading.Thread(target=connection.sendall, args=(sent,))
        sender.start()
        got = bytearray()
        while len(got) < len(sent):
            got += connection.recv(len(sent) - len(got))
        took_s = time.monotonic() - began_s
        sender.join(WAIT_TIMEOUT_S)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert got == sent
    assert took_s >= 2 * relay.delay_s, "both ways"
    assert took_s < 30 * relay.delay_s, "they are on their way together"
