"""The facts about Redis that `doll.storage.redis_diagnosis` collects as a job's user. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RedisFacts:
    """The answers of Redis."""

    refusal: str = ""  # why Redis cannot be used at all; if set, nothing else is known
    described: str = ""  # its version and kind, as far as known
    latency_s: float = 0.0  # the shortest time of a few PINGs
    denied: tuple[str, ...] = ()  # commands that DOLL needs and this user may not call, each with Redis's reason
    clock_s: float | None = None  # Redis's clock, Unix time at the middle of the call; None if the user may not ask
    asked_s: float = 0.0
    eviction: str | None = None  # `maxmemory-policy`; None if the user may not ask
