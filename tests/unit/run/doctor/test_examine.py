"""What `doll doctor` asks a job's services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doll.errors import CheckpointError
from doll.run.doctor import examine
from doll.run.doctor.examine import _redis, _store
from doll.services import Services
from job_files import job


def test_no_address_of_redis_is_no_failure() -> None:
    (check,) = _redis(job(), Services("localhost:9092", ""))
    assert (check.result, check.todo) == ("ok", "")
    assert "doll up starts a Redis of its own" in check.detail
    assert "redis.address" in check.detail


def test_each_redis_of_a_shard_is_asked(nowhere: Services) -> None:
    addresses = ", ".join([nowhere.redis, nowhere.redis.replace("/0", "/1")])
    asked = job("ps.shards=2", f"redis.shard_addresses=[{addresses}]")
    checks = list(_redis(asked, Services("localhost:9092", "")))
    assert {check.name.rpartition(":")[0] or check.name for check in checks} >= {"Redis", "Redis of shard 0"}
    failed = [check.name for check in checks if check.result == "failed"]
    assert all(any(f"Redis of shard {shard}" in name for name in failed) for shard in (0, 1))


def test_a_store_is_counted_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = _store(job(), tmp_path)
    assert check.result == "ok"
    assert check.detail.startswith("0 checkpoints, ")

    def refuse(*args: Any) -> None:
        raise CheckpointError("Could not connect to the endpoint URL")

    monkeypatch.setattr(examine, "open_store", refuse)
    far = _store(job("checkpoint.folder=s3://bucket/c"), tmp_path)
    assert (far.result, far.detail) == ("failed", "Could not connect to the endpoint URL")
    assert "open the network" in far.todo
