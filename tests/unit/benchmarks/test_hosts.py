"""The network between hosts of `benchmarks.hosts`: when packets arrive, and which do not."""

from __future__ import annotations

import argparse
import struct

import pytest
from benchmarks.hosts.__main__ import link_of
from benchmarks.hosts.faults import HostFault, make_plan
from benchmarks.hosts.router import Link, Switch, address_of, host_of, packets_of
from benchmarks.hosts.timeline import steps, text


def _switch(link: Link) -> Switch:
    switch = Switch(seed=1)
    switch.link = link
    return switch


def test_a_packet_arrives_after_the_delay_and_the_time_of_the_cards() -> None:
    switch = _switch(Link(delay_s=0.02, bits_per_s=8e6))
    assert switch.arrival_s(1.0, 0, 1, 1000) == pytest.approx(1.021)  # 1 ms at 1 MB/s
    assert switch.arrival_s(1.0, 0, 1, 1000) == pytest.approx(1.022)  # behind the first one
    assert switch.arrival_s(1.0, 2, 1, 1000) == pytest.approx(1.023)  # the receiver's card is busy
    assert switch.arrival_s(1.0, 3, 4, 1000) == pytest.approx(1.021)  # other cards are not
    assert _switch(Link(delay_s=0.02)).arrival_s(1.0, 0, 1, 10**9) == pytest.approx(1.02)


def test_a_full_queue_drops() -> None:
    switch = _switch(Link(delay_s=1.0, bits_per_s=8e6, queue_s=0.0015))
    arrivals = [switch.arrival_s(0.0, 0, 1, 1000) for _ in range(3)]
    assert arrivals[0] == pytest.approx(1.001)
    assert arrivals[1:] == [None, None]
    assert switch.counts == {"passed": 1, "dropped": 2}


def test_a_cut_has_a_direction() -> None:
    switch = _switch(Link())
    switch.cuts = {(0, 1)}
    assert switch.arrival_s(0.0, 0, 1, 100) is None
    assert switch.arrival_s(0.0, 1, 0, 100) == 0.0
    assert switch.arrival_s(0.0, 0, 2, 100) == 0.0


def test_so_many_packets_are_lost_and_of_a_long_one_each_part_counts() -> None:
    switch = _switch(Link(loss=0.01))
    for _ in range(10_000):
        switch.arrival_s(0.0, 0, 1, 1500)
    assert switch.counts["lost"] == pytest.approx(100, abs=40)
    switch.counts.clear()
    for _ in range(1000):
        switch.arrival_s(0.0, 0, 1, 60_000, packets=40)
    assert switch.counts["lost"] / 40 == pytest.approx(1000 * (1 - 0.99**40), abs=60)


def test_the_header_of_a_segment_says_how_many_packets_it_is() -> None:
    header = struct.Struct("=BBHHHH")
    assert packets_of(header.pack(0, 0, 0, 0, 0, 0) + bytes(1500)) == 1
    assert packets_of(header.pack(1, 1, 52, 1448, 0, 0) + bytes(52 + 3 * 1448 + 1)) == 4


def test_the_host_that_a_packet_is_for() -> None:
    address = bytes(map(int, address_of(3).split(".")))
    assert host_of(b"\x45" + bytes(15) + address) == 3
    assert host_of(b"\x60" + bytes(39)) is None  # IPv6
    assert host_of(b"\x45" + bytes(15) + b"\xe0\x00\x00\x01") is None  # multicast


def test_a_link_as_text() -> None:
    assert link_of("none") == Link()
    assert link_of("20 ms, 100 Mbit/s, 0.1 %") == Link(delay_s=0.02, bits_per_s=100e6, loss=0.001)
    with pytest.raises(argparse.ArgumentTypeError, match="expected none or '20 ms"):
        link_of("20 s")


def test_a_plan_is_the_same_for_the_same_seed_and_has_every_kind_of_fault() -> None:
    roles = ("server", "worker-0", "worker-1")
    plan = make_plan(60, 1, roles)
    assert plan == make_plan(60, 1, roles)
    assert {fault.way for fault in plan} == {"", "both ways", "to it", "from it"}
    assert {fault.services for fault in plan} == {(), ("kafka",), ("redis",), ("kafka", "redis")}
    assert {fault.kill for fault in plan} == {"", *roles}


def test_the_directions_of_a_cut() -> None:
    assert HostFault("worker-0", ("redis",), "to it").cuts() == [("worker-0", "redis")]
    assert HostFault("worker-0", ("redis",), "from it").cuts() == [("redis", "worker-0")]
    assert HostFault("worker-0", kill="worker-0").cuts() == []
    assert len(HostFault("server", ("kafka", "redis"), "both ways").cuts()) == 4


def test_the_steps_of_a_round_are_told_from_the_lines_of_its_processes() -> None:
    def line(who: str, what: str, begin_s: float, end_s: float, **more: int) -> dict[str, object]:
        return {"who": who, "what": what, "begin_s": begin_s, "end_s": end_s, **more}

    lines = [
        line("server", "apply", 0.9, 1.0),
        line("server", "send", 1.0, 1.0, grant=5, worker=0),
        line("worker-0", "granted", 1.02, 1.02, grant=5),
        line("worker-0", "handle", 1.03, 2.5, grant=5),
        line("worker-0", "load", 1.03, 1.13, grant=5),
        line("worker-0", "put", 2.13, 2.43),
        line("worker-0", "pushed", 2.5, 2.51, push=5),
        line("server", "feed", 2.6, 2.7, push=5, worker=0),
        line("server", "apply", 2.7, 2.8),
    ]
    mean_s = {name.split(" ", 1)[1]: seconds for name, seconds in steps(lines, 0.0, 3.0).items()}
    assert mean_s["grant on its way"] == pytest.approx(0.02)
    assert mean_s["weights read"] == pytest.approx(0.1)
    assert mean_s["computed"] == pytest.approx(1.0)
    assert mean_s["gradient stored"] == pytest.approx(0.3)
    assert mean_s["push on its way, and waits for the server"] == pytest.approx(0.09)
    assert mean_s["round"] == pytest.approx(1.8)
    assert "1000 ms" in text([("computed", mean_s["computed"])])
