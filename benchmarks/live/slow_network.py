"""A slow network for workers on one machine: each reaches Redis, which has weights and steps, through a relay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from doll.drill.relay import Relays
from doll.local.processes import LOOPBACK
from doll.run.local.context import RunHook

if TYPE_CHECKING:
    from doll.local.stack import Stack
    from doll.services import Services

CHANGES: Final = ("blobs.kind=redis",)  # of the job: shared memory has no network


@dataclass
class SlowNetwork(RunHook):
    """Each worker has a link of its own, which passes `bytes_per_s` in each direction, each byte `delay_s` late.
    Samples do not pass it, and grants only where `control.kind` is `redis`."""

    relays: Relays
    bytes_per_s: float | None
    delay_s: float = 0.0
    _ports: dict[str, int] = field(default_factory=dict)

    def services(self, role: str, stack: Stack) -> Services:
        if not role.startswith("worker-"):
            return stack.services
        if role not in self._ports:
            relay = self.relays.open()
            relay.target_port = urlsplit(stack.services.redis).port or 0
            relay.bytes_per_s, relay.delay_s = self.bytes_per_s, self.delay_s
            self._ports[role] = relay.port
        return replace(stack.services, redis=f"redis://{LOOPBACK}:{self._ports[role]}/0")


@contextmanager
def network(mbit_per_s: float, delay_s: float = 0.0) -> Iterator[RunHook]:
    """The hook of a run on links of `mbit_per_s` in each direction, each byte `delay_s` late; 0: no such limit."""
    if not (mbit_per_s or delay_s):
        yield RunHook()
        return
    with Relays() as relays:
        yield SlowNetwork(relays, mbit_per_s * 1e6 / 8 or None, delay_s)
