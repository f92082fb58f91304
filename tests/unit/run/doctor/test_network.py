"""Why an address does not answer."""

from __future__ import annotations

import socket

import pytest
from doll.local.processes import LOOPBACK, free_port
from doll.run.doctor import network
from doll.run.doctor.network import ask_address


def test_an_open_port() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        facts = ask_address(f"{LOOPBACK}:{server.getsockname()[1]}", None)
    assert (facts.problem, facts.why) == ("", "")


def test_a_closed_port_and_a_name_that_is_none() -> None:
    assert ask_address(f"{LOOPBACK}:{free_port()}", None).why == "refused"
    assert ask_address("no-such-host.invalid:1", None).why == "name"


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
            facts = ask_address(f"{LOOPBACK}:{address[1]}", None)
        finally:
            for end in waiting:
                end.close()
    assert facts.why == "silent"
    assert "within" in facts.problem
