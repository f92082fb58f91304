"""What `doll doctor` asks a job's services."""

from __future__ import annotations

from doll.run.doctor.gather import _redis
from doll.services import Services
from job_files import job


def test_no_address_of_redis_is_no_failure() -> None:
    (check,) = _redis(job(), Services("localhost:9092", ""))
    assert (check.result, check.todo) == ("ok", "")
    assert "doll up starts a Redis of its own" in check.detail
    assert "redis.address" in check.detail
