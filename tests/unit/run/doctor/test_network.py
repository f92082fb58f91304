"""Why an address does not answer."""

from __future__ import annotations

import errno
import socket

import pytest
from doll.local.processes import LOOPBACK, free_port
from doll.records.check import Check
from doll.run.doctor import network
from doll.run.doctor.network import ask_address


def asked(address: str, advertised_by: str = "") -> Check:
    (check,) = ask_address("Kafka", address, None, advertised_by=advertised_by)
    return check


def test_an_open_port() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        assert asked(f"{LOOPBACK}:{server.getsockname()[1]}").result == "ok"


def test_a_closed_port_and_a_name_that_is_none() -> None:
    assert "nothing listens on this port" in asked(f"{LOOPBACK}:{free_port()}").todo
    assert "DNS" in asked("no-such-host.invalid:1").todo


def test_an_address_that_brokers_advertise_is_named_as_such() -> None:
    address = f"{LOOPBACK}:{free_port()}"
    check = asked(address, advertised_by="a:1")
    assert check.name == f"Kafka: connect to {address}, which the brokers advertise"
    assert check.todo.startswith("a:1 answers, and sends clients there: set advertised.listeners")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EHOSTUNREACH, "no"), "no route"),
        (OSError(errno.ETIMEDOUT, "no"), "security group"),
        (ValueError("no port"), "correct the address, start it"),
    ],
)
def test_a_reason_has_its_remedy(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert words in asked("a:1").todo


def test_a_host_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_TIMEOUT_S", 0.05)
    with socket.socket() as full:  # its queue is full: the kernel drops what asks for another connection
        full.bind((LOOPBACK, 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        try:
            for end in waiting:
                end.setblocking(False)
                end.connect_ex(address)
            check = asked(f"{LOOPBACK}:{address[1]}")
        finally:
            for end in waiting:
                end.close()
    assert "security group" in check.todo
    assert "within" in check.detail
