"""Whether a job's services answer: asked before a process does anything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from doll.errors import ServiceUnavailableError
from doll.kafka.clients import kafka_problem
from doll.storage.redis_client import redis_problem

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services


def require_services(config: JobConfig, services: Services, timeout_s: float = 8.0) -> None:
    """Return once Redis answers a PING (within 5 s) and Kafka sends its metadata (within `timeout_s`).

    Raises:
        ServiceUnavailableError: one of them does not answer. The message names the address and what to do.
        ConfigError: credentials are missing.
    """
    problems = [problem for problem in (redis_problem(services), kafka_problem(config, services, timeout_s)) if problem]
    if problems:
        raise ServiceUnavailableError("; ".join(problems))
