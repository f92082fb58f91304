"""The records of function invocations that work for a job, in the job's Redis.

A function's owner tells nobody whether an invocation runs, so the invocation says it itself. The provisioner writes an
order before it invokes the function. The invocation claims the order, renews its record while it works, and writes its
end. A second delivery of the same event finds the order claimed. All times are Unix seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import redis

from doll.records.bounded import short
from doll.storage.blobs import key_prefix
from doll.telemetry import get_logger

log = get_logger(__name__)

LOST_AFTER_S: Final = 20.0
"""An invocation that has not renewed its record for this long has ended, and has not recorded it."""
_KEPT_S: Final = 24 * 3600
_MOST_CHARS: Final = 500


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One invocation of the function, for one order.

    Attributes:
        name: name of the order.
        launched_s: time of the order.
        invoked_s: time at which the function's owner accepted the event; None: its answer was lost, or was a refusal.
        started_s: time from which it is billed; None: it has not started.
        limit_s: time at which the function's owner ends it.
        seen_s: time at which it last renewed its record.
        warm_s: time at which its worker was ready to take the place of its predecessor.
        asked_s: time at which the provisioner asked it to leave.
        ended_s, cause: time and cause of its end. The first one that is written counts.
        trouble: reason of a failure.
    """

    name: str
    slot: int
    incarnation: int
    market: str
    launched_s: float
    invoked_s: float | None = None
    started_s: float | None = None
    limit_s: float | None = None
    seen_s: float | None = None
    warm_s: float | None = None
    asked_s: float | None = None
    ended_s: float | None = None
    cause: str = ""
    trouble: str = ""

    def runs(self, now_s: float) -> bool:
        """Return whether it works, or will say so soon."""
        if self.ended_s is not None or self.started_s is None:
            return False
        return now_s - (self.seen_s or self.started_s) <= LOST_AFTER_S


class Invocations:
    """The invocations of one job in one cluster. Every method raises RedisError if Redis does not answer."""

    def __init__(self, client: redis.Redis, job: str, cluster: str) -> None:
        self._client: Any = client  # redis-py's types mix synchronous and asynchronous answers
        self._names = f"{key_prefix(job)}:functions:{cluster}"

    def order(self, name: str, fields: Mapping[str, Any]) -> None:
        """Write a new order. An order of this name that exists is not changed."""
        with self._client.pipeline() as pipe:
            for key, value in fields.items():
                pipe.hsetnx(self._key(name), key, value)
            pipe.expire(self._key(name), _KEPT_S)
            pipe.sadd(self._names, name)
            pipe.execute()

    def claim(self, name: str, holder: str) -> bool:
        """Return whether the order now belongs to `holder`, a unique name; it has one holder, the first."""
        self._client.hsetnx(self._key(name), "claim", holder)
        return bool(self._client.hget(self._key(name), "claim") == holder.encode())

    def mark(self, name: str, **values: float | str) -> None:
        """Write fields of the record, which is created if Redis has lost it."""
        with self._client.pipeline() as pipe:
            pipe.hset(self._key(name), mapping=values)
            pipe.expire(self._key(name), _KEPT_S)
            pipe.sadd(self._names, name)
            pipe.execute()

    def end(self, name: str, at_s: float, cause: str, trouble: str = "") -> bool:
        """Write the end of an invocation. Return False if an end was written before, which stays."""
        key = self._key(name)
        if not self._client.hsetnx(key, "ended_s", at_s):
            return False
        self._client.hset(key, mapping={"cause": cause, "trouble": short(trouble, _MOST_CHARS)})
        return True

    def forget(self, name: str) -> None:
        """Remove an order that was refused, or that ended long ago."""
        with self._client.pipeline() as pipe:
            pipe.srem(self._names, name)
            pipe.delete(self._key(name))
            pipe.execute()

    def get(self, name: str) -> Invocation | None:
        return _invocation(name, self._client.hgetall(self._key(name)))

    def all(self) -> list[Invocation]:
        """Return all invocations, by name."""
        names = sorted(name.decode(errors="replace") for name in self._client.smembers(self._names))
        with self._client.pipeline() as pipe:
            for name in names:
                pipe.hgetall(self._key(name))
            records = pipe.execute()
        invocations = []
        for name, record in zip(names, records, strict=True):
            if (invocation := _invocation(name, record)) is not None:
                invocations.append(invocation)
            else:
                self._client.srem(self._names, name)  # its time in Redis is over
        return invocations

    def predecessor(self, slot: int, incarnation: int, now_s: float) -> Invocation | None:
        """Return an older invocation that still works for the slot."""
        older = [each for each in self.all() if each.slot == slot and each.incarnation < incarnation]
        return next((each for each in older if each.runs(now_s)), None)

    def has_warm_successor(self, slot: int, incarnation: int, now_s: float) -> bool:
        """Return whether a newer invocation is ready to take over the slot."""
        newer = [each for each in self.all() if each.slot == slot and each.incarnation > incarnation]
        return any(each.warm_s is not None and each.runs(now_s) for each in newer)

    def _key(self, name: str) -> str:
        return f"{self._names}:{name}"


_KINDS: Final = {item.name: str(item.type) for item in fields(Invocation)}


def _invocation(name: str, record: Mapping[bytes, bytes]) -> Invocation | None:
    """Return the invocation of a record; None if there is none, or if it is not a record of this version."""
    given: dict[str, Any] = {"name": name}
    try:
        for key, value in record.items():
            kind = _KINDS.get(key.decode())
            if kind is None or key == b"name":
                continue
            given[key.decode()] = value.decode() if kind == "str" else int(value) if kind == "int" else float(value)
        if not all(math.isfinite(value) for value in given.values() if isinstance(value, float)):
            raise ValueError("expected finite times")
        return Invocation(**given)
    except (TypeError, ValueError, UnicodeDecodeError) as error:
        if record:
            log.warning("invalid_function_record", name=short(name), reason=short(error))
        return None
