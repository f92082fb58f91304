"""Check that a job's services answer, before a process does anything else."""

from __future__ import annotations

from dataclasses import replace

from doll.config import JobConfig
from doll.errors import ServiceUnavailableError
from doll.kafka.clients import kafka_problem
from doll.services import Services, shard_addresses
from doll.storage.redis_client import redis_problem

_DOLL_UP = "; or use `doll up`, which starts its own where no address is given"


def require_services(config: JobConfig, services: Services, timeout_s: float = 8.0, *, hint: str = _DOLL_UP) -> None:
    """Return after Redis, also that of each shard, has answered a PING (within 5 s), and Kafka has sent its metadata
    (within `timeout_s`). Raise ConfigError if credentials are missing. Raise ServiceUnavailableError if a service does
    not answer; the message names the address and what to do, and ends with `hint`."""
    of_shards = (
        redis_problem(replace(services, redis=url), origin="redis.shard_addresses") for url in shard_addresses(config)
    )
    _raise((redis_problem(services), *of_shards, kafka_problem(config, services, timeout_s)), hint)


def require_kafka(config: JobConfig, services: Services, timeout_s: float = 8.0) -> None:
    """Return after Kafka has answered. This check is for processes that only read or write topics: they also work while
    Redis is unavailable. Raises the same errors as `require_services`."""
    _raise((kafka_problem(config, services, timeout_s),), _DOLL_UP)


def _raise(problems: tuple[str | None, ...], hint: str) -> None:
    if found := [problem for problem in problems if problem]:
        raise ServiceUnavailableError("; ".join(found) + hint)
