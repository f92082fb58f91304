"""The one place that knows where a job's checkpoints are (a folder, or S3) and its blobs (shared memory, or Redis).

Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from doll.errors import ConfigError
from doll.storage.file_checkpoints import FileCheckpointStore

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services
    from doll.storage.checkpoints import CheckpointStore
    from doll.storage.redis_blobs import RedisBlobs
    from doll.storage.shm_blobs import ShmBlobs

S3 = "s3://"


def checkpoint_location(config: JobConfig, run_folder: Path) -> Path | str:
    """A folder, or `s3://bucket/prefix`: as the job file says, else `checkpoints/` in the run folder."""
    place = config.checkpoint.folder
    if place is None:
        return run_folder / "checkpoints"
    return config.path(place) if isinstance(place, Path) else place


def open_store(config: JobConfig, run_folder: Path) -> CheckpointStore:
    """The job's checkpoint store. Nothing is read or written yet.

    Raises:
        CheckpointError: it is in S3 and boto3 cannot be set up (region, credentials file).
    """
    place, keep = checkpoint_location(config, run_folder), config.checkpoint.keep
    if isinstance(place, Path):
        return FileCheckpointStore(place, config.job, keep=keep)
    from doll.storage.s3_checkpoints import S3CheckpointStore

    return S3CheckpointStore(place, config.job, keep=keep)


def open_blobs(
    config: JobConfig, services: Services, *, give_up: Callable[[], bool], timeout_s: float = 10.0
) -> ShmBlobs | RedisBlobs:
    """The job's blob store: in shared memory where whoever started this process has a folder there, else in Redis.

    Args:
        give_up: asked while Redis is away; see `RedisBlobs`.
        timeout_s: for Redis; see `connect_redis`.

    Raises:
        ConfigError: `blobs.kind` is shm and there is no folder.
        ServiceUnavailableError: the folder is not ours alone.
    """
    from doll.storage.redis_blobs import RedisBlobs
    from doll.storage.redis_client import connect_redis

    kind = config.blobs.kind
    if kind == "shm" and not services.blobs:
        raise ConfigError(
            "blobs.kind is shm: expected a process that `doll up` starts, or one with `--job RUN_FOLDER` of a run that "
            "is still going on this machine; set blobs.kind: redis for workers elsewhere"
        )
    redis_store = RedisBlobs(connect_redis(services, timeout_s=timeout_s), give_up=give_up)
    if kind == "redis" or not services.blobs:
        return redis_store
    from doll.storage.shm_blobs import ShmBlobs, limit_bytes

    folder = Path(services.blobs)
    return ShmBlobs(folder, limit_bytes=limit_bytes(folder.parent), fallback=redis_store)
