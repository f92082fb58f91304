"""A local broker with listeners and settings that a test adds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from doll.local import processes
from doll.local.kafka_broker import LocalKafka


class SecuredKafka(LocalKafka):
    """One node with more listeners beside its plaintext one, whose clients are nobody in particular.

    Args:
        listeners: security protocol of each by its name, of small letters.
        settings: more server properties; `{name}` stands for the port of a listener.
    """

    def __init__(self, folder: Path, listeners: Mapping[str, str], settings: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._more = dict(listeners)
        self._settings = dict(settings)
        self._ports: dict[str, int] = {}

    def address_of(self, name: str) -> str:
        """`127.0.0.1:port` of a listener."""
        return f"{processes.LOOPBACK}:{self._ports[name]}"

    def _configure(self) -> None:
        super()._configure()
        self._ports = {name: processes.free_port() for name in self._more}
        own = dict(
            line.split("=", 1) for line in self._properties.read_text().splitlines() if "=" in line and line[0] != " "
        )
        ends = ",".join(f"{name.upper()}://{self.address_of(name)}" for name in self._more)
        added = {
            "listeners": f"{own['listeners']},{ends}",
            "advertised.listeners": f"{own['advertised.listeners']},{ends}",
            "listener.security.protocol.map": ",".join(
                [
                    own["listener.security.protocol.map"],
                    *(f"{name.upper()}:{kind}" for name, kind in self._more.items()),
                ]
            ),
            **self._settings,
        }
        with self._properties.open("a") as file:
            file.writelines(f"{key}={value}\n" for key, value in added.items())
