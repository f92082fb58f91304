"""Which process reaches which service through which relay."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self
from urllib.parse import urlsplit

from doll.drill.relay import Relay, Relays

if TYPE_CHECKING:
    from doll.local.stack import Stack
    from doll.services import Services

Service = Literal["kafka", "redis"]


class Wires:
    """A relay for each role and service. Use it as a context manager around the whole run.

    A Kafka client goes where the broker tells it to: each role therefore has a listener of its own at the broker, which
    advertises the role's relay.
    """

    def __init__(self, roles: Collection[str]) -> None:
        self._roles = tuple(roles)
        self._relays = Relays()
        self._wires: dict[tuple[str, Service], Relay] = {}

    @property
    def detours(self) -> Mapping[str, int]:
        """What a broker of ours shall tell its clients, by role; see `LocalKafka`."""
        return {role: relay.port for (role, service), relay in self._wires.items() if service == "kafka"}

    def services(self, role: str, stack: Stack) -> Services:
        """Where `role` finds Kafka and Redis: through its relays, where they are services of ours."""
        kafka, redis = stack.services.kafka, stack.services.redis
        if stack.kafka is not None and (wire := self._wires.get((role, "kafka"))) is not None:
            wire.target_port = stack.kafka.detour_port(role)
            kafka = f"127.0.0.1:{wire.port}"
        if stack.redis is not None and (wire := self._wires.get((role, "redis"))) is not None:
            wire.target_port = urlsplit(redis).port or 0
            redis = f"redis://127.0.0.1:{wire.port}/0"
        return replace(stack.services, kafka=kafka, redis=redis)

    def wire(self, role: str, service: Service) -> Relay:
        """The relay of `role` to `service`."""
        return self._wires[role, service]

    def __enter__(self) -> Self:
        self._relays.__enter__()
        services: tuple[Service, ...] = ("kafka", "redis")
        self._wires = {(role, service): self._relays.open() for role in self._roles for service in services}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._relays.__exit__(kind, error, trace)
