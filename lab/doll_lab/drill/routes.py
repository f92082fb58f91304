"""The relays through which each process reaches Kafka, Redis and the control socket in a drill."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from doll.local.processes import LOOPBACK
from doll.run.local.context import PARAMETER_SERVERS

from doll_lab.drill.plan import Service
from doll_lab.drill.relay import Relay, Relays, TcpRelay, UnixRelay

if TYPE_CHECKING:
    from doll.local.stack import Stack
    from doll.services import Services


class RoleRelays:
    """A relay for each role and service. Use it as a context manager around the whole run.

    Parameter servers listen on one control socket, and each worker connects to it through its own relay. A Kafka client
    connects to the addresses that the brokers advertise. Each role therefore has its own listener at each broker; the
    listener advertises the role's relay to this broker.

    Args:
        roles: names of the roles.
        brokers: number of brokers that this run starts.
    """

    def __init__(self, roles: Collection[str], brokers: int = 1) -> None:
        self._roles = tuple(roles)
        self._brokers = brokers
        self._relays = Relays()
        self._by_role: dict[tuple[str, Service], tuple[TcpRelay, ...]] = {}
        self._control: dict[str, UnixRelay] = {}  # by worker
        self._folder = tempfile.TemporaryDirectory(prefix="doll-drill-")  # mode 0700
        self._control_socket = Path(self._folder.name) / "ps.sock"

    @property
    def advertised_ports(self) -> Sequence[Mapping[str, int]]:
        """Return the port that each broker advertises, by role; see `LocalKafka`."""
        return [
            {role: self._by_role[role, "kafka"][broker].port for role in self._roles} for broker in range(self._brokers)
        ]

    def services(self, role: str, stack: Stack) -> Services:
        """Return the addresses of the services for `role`: its relays for Kafka and Redis, if this run started them."""
        kafka, redis = stack.services.kafka, stack.services.redis
        if stack.kafka is not None and (relays := self._by_role.get((role, "kafka"))) is not None:
            for relay, node in zip(relays, stack.kafka.nodes, strict=True):
                relay.target_port = node.listener_port(role)
            kafka = ",".join(f"{LOOPBACK}:{relay.port}" for relay in relays)
        if stack.redis is not None and (relays := self._by_role.get((role, "redis"))) is not None:
            (relay,) = relays
            relay.target_port = urlsplit(redis).port or 0
            redis = f"redis://{LOOPBACK}:{relay.port}/0"
        control = self._control[role].path if role in self._control else self._control_socket
        return replace(stack.services, kafka=kafka, redis=redis, control=str(control))

    def to(self, role: str, service: Service) -> tuple[Relay, ...]:
        """Return the relays of `role` to `service`: for Kafka one per broker; for the server's control socket all."""
        if service == "control":
            return tuple(self._control.values()) if role in PARAMETER_SERVERS else (self._control[role],)
        return self._by_role[role, service]

    def __enter__(self) -> Self:
        self._relays.__enter__()
        num_relays: dict[Service, int] = {"kafka": self._brokers, "redis": 1}
        self._by_role = {
            (role, service): tuple(self._relays.open() for _ in range(number))
            for role in self._roles
            for service, number in num_relays.items()
        }
        self._control = {
            role: self._relays.open_unix(self._control_socket.with_name(f"{role}.sock"), self._control_socket)
            for role in self._roles
            if role.startswith("worker-")
        }
        return self

    def __exit__(self, *exc: object) -> None:
        self._relays.__exit__(*exc)
        self._folder.cleanup()
