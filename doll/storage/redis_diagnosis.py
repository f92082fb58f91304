"""Collect facts about Redis for `doll doctor`. This only writes, reads and deletes probe keys."""

from __future__ import annotations

import time
import timeit
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import redis

from doll.storage.blobs import key_prefix
from doll.storage.redis_client import connect_redis, redis_problem
from doll.storage.redis_facts import RedisFacts

if TYPE_CHECKING:
    from doll.services import Services

_PROBE_S: Final = 30
_LATENCY_TRIES: Final = 5


def ask_redis(services: Services, job: str, timeout_s: float = 4.0) -> RedisFacts:
    """Return all facts."""
    if (refusal := redis_problem(services, timeout_s)) is not None:
        return RedisFacts(refusal=refusal)
    with connect_redis(services, timeout_s=timeout_s, retries=0) as client:
        latencies_s = timeit.repeat(client.ping, number=1, repeat=_LATENCY_TRIES)
        clock = _asked(lambda: client.time())
        asked_s = time.time()
        info = _asked(lambda: client.info())
        known = info if isinstance(info, dict) else {}
        version = known.get("redis_version", "")
        return RedisFacts(
            described=" ".join(filter(None, (str(known.get("redis_mode", "")), version and f"Redis {version}"))),
            latency_s=min(latencies_s),
            denied=tuple(_denied(client, f"{key_prefix(job)}:doctor:{uuid.uuid4().hex}")),
            clock_s=None if clock is None else clock[0] + clock[1] / 1e6,
            asked_s=asked_s,
            eviction=known.get("maxmemory_policy"),
        )


def _denied(client: Any, key: str) -> list[str]:
    """Return the commands that this user may not call, tested with keys that begin with `key` and expire."""
    blob, stream = f"{key}:blob", f"{key}:stream"
    calls: dict[str, Callable[[], Any]] = {
        "SET": lambda: client.set(blob, b"probe", px=_PROBE_S * 1000),
        "GET": lambda: client.get(blob),
        "MGET": lambda: client.mget([blob]),
        "EVAL": lambda: client.eval("return redis.call('GET', KEYS[1])", 1, blob),
        "XADD": lambda: client.xadd(stream, {"f": b"probe"}, maxlen=10),
        "EXPIRE": lambda: client.expire(stream, _PROBE_S),
        "XREAD": lambda: client.xread({stream: "0"}, count=1),
        "XTRIM": lambda: client.xtrim(stream, maxlen=1),
    }
    denied = []
    try:
        for name, call in calls.items():
            try:
                call()
            except redis.RedisError as exc:
                denied.append(f"{name} ({exc})")
    finally:
        for name in (blob, stream):
            try:
                client.unlink(name)
            except redis.RedisError as exc:
                denied.append(f"UNLINK ({exc})")
    return denied


def _asked(call: Callable[[], Any]) -> Any:
    """Return the result of `call`; None if this user may not make the call."""
    try:
        return call()
    except redis.RedisError:
        return None
