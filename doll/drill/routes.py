"""Which process reaches which service through which relay."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self
from urllib.parse import urlsplit

from doll.drill.relay import Relay, Relays

if TYPE_CHECKING:
    from doll.local.stack import Stack
    from doll.services import Services

Service = Literal["kafka", "redis"]


class RoleRelays:
    """A relay for each role and service. Use it as a context manager around the whole run.

    A Kafka client goes where the brokers tell it to: each role therefore has a listener of its own at each broker,
    which advertises the role's relay to that broker.

    Args:
        brokers: how many there are, where they are ours.
    """

    def __init__(self, roles: Collection[str], brokers: int = 1) -> None:
        self._roles = tuple(roles)
        self._brokers = brokers
        self._relays = Relays()
        self._role_relays: dict[tuple[str, Service], tuple[Relay, ...]] = {}

    @property
    def advertised_ports(self) -> Sequence[Mapping[str, int]]:
        """For each broker of ours what it shall tell its clients, by role; see `LocalKafka`."""
        return [
            {role: self._role_relays[role, "kafka"][at].port for role in self._roles} for at in range(self._brokers)
        ]

    def services(self, role: str, stack: Stack) -> Services:
        """Where `role` finds Kafka and Redis: through its relays, where they are services of ours."""
        kafka, redis = stack.services.kafka, stack.services.redis
        if stack.kafka is not None and (wires := self._role_relays.get((role, "kafka"))) is not None:
            for relay, node in zip(wires, stack.kafka.nodes, strict=True):
                relay.target_port = node.listener_port(role)
            kafka = ",".join(f"127.0.0.1:{relay.port}" for relay in wires)
        if stack.redis is not None and (wires := self._role_relays.get((role, "redis"))) is not None:
            (relay,) = wires
            relay.target_port = urlsplit(redis).port or 0
            redis = f"redis://127.0.0.1:{relay.port}/0"
        return replace(stack.services, kafka=kafka, redis=redis)

    def wires(self, role: str, service: Service) -> tuple[Relay, ...]:
        """The relays of `role` to `service`: to Kafka, one for each broker."""
        return self._role_relays[role, service]

    def __enter__(self) -> Self:
        self._relays.__enter__()
        many: dict[Service, int] = {"kafka": self._brokers, "redis": 1}
        self._role_relays = {
            (role, service): tuple(self._relays.open() for _ in range(number))
            for role in self._roles
            for service, number in many.items()
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._relays.__exit__(kind, error, trace)
