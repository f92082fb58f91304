"""Another run of the same job name on the same Redis, with a Kafka of its own: neither may see the other's blobs.

python -m doll.drill.second_run JOB.yaml FOLDER REDIS_URL
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from doll.config import ArrivalsConfig, StopConfig, load
from doll.errors import ConfigError
from doll.kafka.topic_plan import plan_topics
from doll.local import processes
from doll.local.mock_kafka import MockKafka

if TYPE_CHECKING:
    from doll.config import JobConfig

_UPDATES: Final = 10
_RATE_PER_S: Final = 500.0  # where the job's stream has no pace: the mock keeps a few megabytes of a partition


def start(job_file: Path, folder: Path, redis_url: str) -> subprocess.Popen[bytes]:
    """Start the run; its exit code is 0 if it has learned and its own audit has passed. It ends with this process."""
    command = [sys.executable, "-m", __spec__.name, str(job_file), str(folder), redis_url]
    return processes.spawn(command, folder / "second-run.log")


def config_of(job: JobConfig, kafka: str, redis_url: str, folder: Path) -> JobConfig:
    """The same job, with one worker where the rates allow it, until a few updates are made."""
    same_rates = isinstance(job.arrivals.rate_per_s, float)
    updates = {
        "kafka": job.kafka.model_copy(update={"address": kafka, "replication_factor": 1}),
        "redis": job.redis.model_copy(update={"address": redis_url}),
        "data": job.data.model_copy(update={"workers": 1} if same_rates else {}),
        "checkpoint": job.checkpoint.model_copy(update={"folder": folder / "checkpoints", "event_log": False}),
        "evaluation": job.evaluation.model_copy(update={"enabled": False}),
        "stop": StopConfig(updates=_UPDATES),
    }
    if job.arrivals.process == "asap":
        updates["arrivals"] = ArrivalsConfig(rate_per_s=_RATE_PER_S)
    return job.model_copy(update=updates)


def main(argv: list[str]) -> int:
    """Run it; the exit code of `doll up`."""
    from doll.run.local.up import run_up

    job_file, folder, redis_url = Path(argv[0]), Path(argv[1]), argv[2]
    if not folder.is_dir():
        raise ConfigError(f"expected a folder, got {folder}")
    job = load(job_file)
    shape = config_of(job, "", redis_url, folder)
    with MockKafka(folder / "kafka", {topic.name: topic.partitions for topic in plan_topics(shape)}) as kafka:
        return int(run_up(config_of(job, kafka.address, redis_url, folder), folder)["exit_code"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
