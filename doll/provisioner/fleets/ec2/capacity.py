"""Pools without capacity, and the time for which they are not requested. Pure: `now_s` is an argument.

If several pools of a zone fail within a minute, the whole zone is short of machines, so its other pools are not
requested either. In another autoscaler, requests to one pool after the other led to thousands of useless requests
(karpenter #3198).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from doll.provisioner.fleets.ec2.errors import CAPACITY_BACKOFF_S
from doll.provisioner.planning.state import Market


@dataclass(frozen=True, order=True)
class Ec2Pool:
    """Instances of one type in one zone: the unit of price and of capacity."""

    instance_type: str
    zone: str

    @property
    def name(self) -> str:
        """The name of the pool in `Instance.pool`: "c5.xlarge/us-east-1a"."""
        return f"{self.instance_type}/{self.zone}"

    @classmethod
    def parse(cls, name: str) -> Ec2Pool:
        """Return the pool with this name. Raises ValueError if it is not the name of a pool."""
        instance_type, slash, zone = name.partition("/")
        if not (instance_type and slash and zone):
            raise ValueError(f"expected type/zone as in c5.xlarge/us-east-1a, got {name!r}")
        return cls(instance_type, zone)


_ZONE_POOLS: Final = 3
_ZONE_WINDOW_S: Final = 60.0


class CapacityCache:
    """Pools without capacity, by market. If `_ZONE_POOLS` pools of a zone fail within `_ZONE_WINDOW_S`, the whole zone
    counts as unavailable."""

    def __init__(self) -> None:
        self._pools: dict[tuple[Ec2Pool, Market], float] = {}  # -> until when
        self._zones: dict[tuple[str, Market], float] = {}
        self._markets: dict[Market, float] = {}
        self._failed_s: dict[tuple[Ec2Pool, Market], float] = {}

    def mark_unavailable(self, pool: Ec2Pool, market: Market, now_s: float, for_s: float = CAPACITY_BACKOFF_S) -> None:
        """Record that the pool had no machine at `now_s`."""
        self._pools[pool, market] = max(now_s + for_s, self._pools.get((pool, market), now_s))
        self._failed_s = {key: at_s for key, at_s in self._failed_s.items() if now_s - at_s <= _ZONE_WINDOW_S}
        self._failed_s[pool, market] = now_s
        together = sum(key[0].zone == pool.zone and key[1] == market for key in self._failed_s)
        if together >= _ZONE_POOLS:
            self._zones[pool.zone, market] = now_s + CAPACITY_BACKOFF_S

    def exclude(self, pool: Ec2Pool, market: Market, until_s: float) -> None:
        """Exclude the pool, but not its zone, from requests."""
        self._pools[pool, market] = max(until_s, self._pools.get((pool, market), until_s))

    def mark_market(self, market: Market, now_s: float, backoff_s: float) -> None:
        """Exclude all pools of this market from requests, because a quota is used up."""
        self._markets[market] = now_s + backoff_s

    def market_until_s(self, market: Market, now_s: float) -> float | None:
        """Return the time until which the whole market is excluded; None if it is not."""
        until_s = self._markets.get(market, now_s)
        return until_s if until_s > now_s else None

    def lacks_capacity(self, pool: Ec2Pool, market: Market, now_s: float) -> bool:
        """Return whether the pool, its zone, or the whole market is excluded at `now_s`."""
        until_s = max(
            self._pools.get((pool, market), now_s),
            self._zones.get((pool.zone, market), now_s),
            self._markets.get(market, now_s),
        )
        return until_s > now_s

    def clear(self, pool: Ec2Pool, market: Market) -> None:
        """Record that the pool has launched a machine: requests to it and its zone are allowed again."""
        self._pools.pop((pool, market), None)
        self._zones.pop((pool.zone, market), None)
        self._failed_s.pop((pool, market), None)
