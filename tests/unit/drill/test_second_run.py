"""The second run of a drill has the job's name and Redis, and nothing else of the first run."""

from __future__ import annotations

from pathlib import Path

import pytest
from doll.config import parse
from doll.drill.second_run import config_of, main
from doll.errors import ConfigError

JOB = """
job: shared-name
task: {class: 'a:B'}
data: {workers: 4}
source: {kind: digits}
kafka: {replication_factor: 3, address: '127.0.0.1:1'}
arrivals: {rate_per_s: RATE}
"""


@pytest.mark.parametrize(("rate", "workers"), [("50", 1), ("[50, 50, 50, 10]", 4)])
def test_it_has_a_kafka_and_checkpoints_of_its_own(tmp_path: Path, rate: str, workers: int) -> None:
    job = config_of(parse(JOB.replace("RATE", rate)), "127.0.0.1:2", "redis://127.0.0.1:3/0", tmp_path)
    assert (job.job, job.redis.address) == ("shared-name", "redis://127.0.0.1:3/0")
    assert (job.kafka.address, job.kafka.replication_factor) == ("127.0.0.1:2", 1)
    assert job.checkpoint.folder == tmp_path / "checkpoints"
    assert (job.data.workers, job.stop.updates, job.evaluation.enabled) == (workers, 10, False)


def test_a_stream_without_a_pace_gets_one(tmp_path: Path) -> None:
    """A mock of Kafka deletes what a worker that is still starting has not read."""
    job = parse(JOB.replace("rate_per_s: RATE", "process: asap"))
    second = config_of(job, "127.0.0.1:2", "redis://127.0.0.1:3/0", tmp_path)
    assert (second.arrivals.process, second.arrivals.rate_per_s) == ("poisson", 500.0)


def test_without_a_folder_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a folder"):
        main(["job.yaml", str(tmp_path / "none"), "redis://127.0.0.1:3/0"])
