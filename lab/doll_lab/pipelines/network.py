"""The links between the devices of a fleet. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from doll.pipeline.profiling.profile import Device


@dataclass(frozen=True, slots=True)
class Network:
    """The rates and the latency of the links between devices; an infinite rate: transfers take no time."""

    within_node_bytes_per_s: float = math.inf
    between_nodes_bytes_per_s: float = math.inf
    latency_s: float = 0.0

    def bytes_per_s(self, a: Device, b: Device) -> float:
        return self.within_node_bytes_per_s if a.node == b.node else self.between_nodes_bytes_per_s

    def transfer_s(self, a: Device, b: Device, num_bytes: float) -> float:
        """Return the seconds for a message of `num_bytes` from `a` to `b`."""
        return self.latency_s + num_bytes / self.bytes_per_s(a, b)
