"""Free stages on other machines, and the secret of their links, in the run's Redis.

A stage offers itself again and again while it is free, and a worker that needs it connects to it. A record only tells
where to connect: who may take a place is decided by the stage (`doll.pipeline.links.tcp`).
"""

from __future__ import annotations

import os
import secrets
from typing import Any, Final

import msgspec
import redis

from doll.pipeline.links.tcp import SECRET_BYTES, Address
from doll.storage.blobs import key_prefix

OFFER_EVERY_S: Final = 0.5
_OFFER_S: Final = 3.0
GANG_ENV: Final = "DOLL_GANG"
"""Name of the gang of a fleet. Its worker finds only its stages: gangs of two machines of a slot may overlap, and a
stage of the one that ends must not be taken by the other one."""
_SECRET_S: Final = 86_400  # since the last offer; who has a link does not need the secret any more


class StagePlaces:
    """The places of a job's stages. `scope` identifies the job on this Redis. Calls raise RedisError if Redis does not
    answer."""

    def __init__(self, client: redis.Redis, scope: str) -> None:
        self._client: Any = client  # redis-py's types mix synchronous and asynchronous answers
        self._prefix = f"{key_prefix(scope)}:stage"
        gang = os.environ.get(GANG_ENV, "")
        self._places = f"{self._prefix}-of-{gang}" if gang else self._prefix

    def secret(self) -> bytes:
        """Return the secret that all processes of the run share. The first one that asks creates it."""
        key = f"{self._prefix}-secret"
        self._client.set(key, secrets.token_bytes(SECRET_BYTES), nx=True, ex=_SECRET_S)
        self._client.expire(key, _SECRET_S)
        value = self._client.get(key)
        if not isinstance(value, bytes) or len(value) != SECRET_BYTES:
            raise redis.RedisError(f"expected {SECRET_BYTES} bytes in {key}: delete this key")
        return value

    def offer(self, worker: int, stage: int, address: Address) -> None:
        """Offer a free stage for some seconds."""
        self._client.set(f"{self._places}:{worker}:{stage}", msgspec.json.encode(address), px=int(1000 * _OFFER_S))

    def find(self, worker: int, stages: int) -> list[Address | None]:
        """Return the address of each stage of a worker; None if the stage is not free, or its record is not valid."""
        values = self._client.mget([f"{self._places}:{worker}:{stage}" for stage in range(stages)])
        return [None if value is None else _decode(value) for value in values]


def _decode(value: bytes) -> Address | None:
    try:
        return msgspec.json.decode(value, type=Address)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
