"""Parameter servers share one control socket, and each worker reaches it through a relay of its own."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from doll.services import Services

from doll_lab.drill.routes import RoleRelays


def test_a_workers_control_socket_is_its_relay_to_the_servers() -> None:
    # Neither Kafka nor Redis is of this run.
    stack: Any = SimpleNamespace(services=Services("kafka:1", "redis://redis:2/0"), kafka=None, redis=None)
    with RoleRelays(["ps", "ps-standby", "worker-0", "worker-1", "producer"]) as relays:
        one, other = (relays.to(f"worker-{worker}", "control") for worker in (0, 1))
        assert len(one) == len(other) == 1
        assert set(one).isdisjoint(other)
        assert relays.to("ps", "control") == relays.to("ps-standby", "control") == (*one, *other)
        server = relays.services("ps", stack)
        assert server == relays.services("ps-standby", stack)
        assert (server.kafka, server.redis) == ("kafka:1", "redis://redis:2/0")
        worker = Path(relays.services("worker-1", stack).control)
        assert worker != Path(server.control)
        assert worker.is_socket()
        assert stat.S_IMODE(worker.parent.stat().st_mode) == 0o700
        (relay,) = other
        relay.start_cut("removed")
        assert not worker.exists()
    assert not worker.parent.exists()
