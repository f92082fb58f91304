"""A Redis server for each shard: the bytes of the slices spread over them, and each may be lost."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from doll.local.redis_server import LocalRedis
from doll.services import Services
from doll.storage.redis_client import connect_redis
from job_rig import MakePipeline

pytestmark = pytest.mark.integration


def test_each_slice_is_in_the_redis_of_its_shard(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(LocalRedis(tmp_path / f"redis-{number}")) for number in range(2)]
        addresses = ", ".join(server.address for server in servers)
        job = make_pipeline(
            "stop.updates=60", "ps.shards=2", "task.args.hidden=[600, 600]", f"redis.shard_addresses=[{addresses}]"
        )
        job.start()
        job.send(job.samples(480))
        job.until_version(10)
        for number, server in enumerate(servers):
            keys = keys_of(Services("", server.address), "*")
            assert keys
            assert {key.rpartition(":")[2] for key in keys} == {f"{number}of2"}
        servers[1].kill()
        servers[1].start()  # empty
        job.send(job.samples(620))
        job.until_finished()
        assert job.restarts == []
        report = job.assert_audit_ok()
        assert (report.version, report.applied) == (60, 960)
        names = keys_of(job.services, f"doll:{{{job.config.job}}}*")
        assert any(name.endswith(":w:latest") for name in names)
        assert not [name for name in names if name.endswith("of2")]


def keys_of(services: Services, pattern: str) -> list[str]:
    with closing(connect_redis(services)) as client:
        return [key.decode() for key in client.scan_iter(pattern, count=1000)]
