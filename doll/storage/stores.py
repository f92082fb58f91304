"""Open a job's checkpoint store (a folder, or S3) and its blob store (shared memory, or Redis). Also find the weights
that `training.init_from` names. This module does not import torch.

Register a new checkpoint store in `CHECKPOINT_STORES`, and the form of its URLs in `doll.config.roles`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from doll.config.roles import CHECKPOINT_URLS
from doll.errors import ConfigError
from doll.services import shard_addresses
from doll.storage.file_checkpoints import FileCheckpointStore
from doll.storage.version_marks import NO_HISTORY, VersionHistory

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services
    from doll.storage.checkpoints import CheckpointStore
    from doll.storage.redis_blobs import RedisBlobs
    from doll.storage.sharded_blobs import ShardedBlobs
    from doll.storage.shm_blobs import ShmBlobs

INIT_FROM: Final = "training.init_from"
SAFETENSORS: Final = ".safetensors"
TORCH: Final = (".pt", ".pth", ".bin", ".ckpt")
_VERSION: Final = re.compile(r"(.+)@([A-Za-z0-9_-]{1,63})")


def checkpoint_location(config: JobConfig, run_folder: Path) -> Path | str:
    """Return the checkpoint folder or `s3://bucket/prefix` of the job file, or `checkpoints/` in the run folder."""
    folder = config.checkpoint.folder
    if folder is None:
        return run_folder / "checkpoints"
    return config.path(folder) if isinstance(folder, Path) else folder


def open_store(config: JobConfig, run_folder: Path, part: str = "") -> CheckpointStore:
    """Return the job's checkpoint store, or a separate one in the folder `part` beside the checkpoints. The call does
    not access the store. Raise CheckpointError if the store is in S3 and boto3 cannot be set up (region, credentials
    file). Raise ConfigError if no store is registered for the scheme of `checkpoint.folder`."""
    location, section = checkpoint_location(config, run_folder), config.checkpoint
    history = VersionHistory(section.history_every_s, section.history_s)
    if isinstance(location, Path):
        return open_place(location / part, config.job, section.keep, history)
    return open_place(f"{location.rstrip('/')}/{part}" if part else location, config.job, section.keep, history)


def open_place(
    location: Path | str, job: str | None, keep: int = 2, history: VersionHistory = NO_HISTORY
) -> CheckpointStore:
    """Return the checkpoint store of a folder or URL; see `open_store`. Without `job`, the store accepts checkpoints of
    any job, and must only be read."""
    if isinstance(location, Path):
        return FileCheckpointStore(location, job, keep=keep, history=history)
    opener = CHECKPOINT_STORES.get(location.partition("://")[0])
    if opener is None:
        schemes = " or ".join(f"{scheme}://" for scheme in CHECKPOINT_STORES)
        raise ConfigError(f"checkpoint.folder: expected a folder or {schemes}, got {location}")
    return opener(location, job, keep, history)


def _open_s3(url: str, job: str | None, keep: int, history: VersionHistory) -> CheckpointStore:
    from doll.storage.s3_checkpoints import S3CheckpointStore

    return S3CheckpointStore(url, job, keep=keep, history=history)


CHECKPOINT_STORES: dict[str, Callable[[str, str | None, int, VersionHistory], CheckpointStore]] = {"s3": _open_s3}
"""The functions that open the store of a URL, by its scheme; their arguments are the URL, the job's name, and the
number and the history of checkpoints to keep."""


def open_blobs(
    config: JobConfig, services: Services, *, give_up: Callable[[], bool], timeout_s: float = 10.0
) -> ShmBlobs | RedisBlobs | ShardedBlobs:
    """Return the job's blob store: in several Redis servers if `redis.shard_addresses` names them, in shared memory if
    `services.blobs` names a folder, otherwise in Redis. Raise ConfigError if an address of Redis is not valid, or
    `blobs.kind` is shm and there is no folder, and ServiceUnavailableError if the folder belongs to another user or
    other users can access it."""
    from doll.storage.redis_blobs import RedisBlobs
    from doll.storage.redis_client import connect_redis
    from doll.storage.sharded_blobs import ShardedBlobs

    kind = config.blobs.kind
    if kind == "shm" and not services.blobs:
        raise ConfigError(
            "blobs.kind is shm: expected a process that `doll up` starts, or one with `--job RUN_FOLDER` of a run that "
            "is still going on this machine; set blobs.kind: redis for workers elsewhere"
        )
    redis_store = RedisBlobs(connect_redis(services, timeout_s=timeout_s), give_up=give_up)
    if urls := shard_addresses(config):
        places = [replace(services, redis=url) for url in urls]
        return ShardedBlobs(
            redis_store, [RedisBlobs(connect_redis(place, timeout_s=timeout_s), give_up=give_up) for place in places]
        )
    if kind == "redis" or not services.blobs:
        return redis_store
    from doll.storage.shm_blobs import ShmBlobs, limit_bytes

    folder = Path(services.blobs)
    return ShmBlobs(folder, limit_bytes=limit_bytes(folder.parent), fallback=redis_store)


def find_source(config: JobConfig, source: str) -> tuple[Path | str, str | None]:
    """Return the file, folder or URL that `training.init_from` names, and the version of a run, in the form for
    `doll.storage.checkpoints.resolve_version`. None: the newest version. Raise ConfigError if the file or folder does
    not exist, or the scheme of the URL has no checkpoint store."""
    for text, version in _readings(source):
        if "://" in text:
            if not any(form.fullmatch(text) for _, form in CHECKPOINT_URLS.values()):
                forms = " or ".join(form for form, _ in CHECKPOINT_URLS.values())
                raise ConfigError(f"{INIT_FROM}: expected {forms} of a URL, got {source}")
            return text.rstrip("/"), version
        for path in (config.path(Path(text)), Path(text)):
            if path.exists():
                return path.resolve(), version
    raise ConfigError(
        f"{INIT_FROM}: expected a run folder, a folder of checkpoints, s3://bucket/prefix, or a file that ends in "
        f"{', '.join((SAFETENSORS, *TORCH))}; got {source}, and it does not exist in {config.base_folder} or "
        f"{Path.cwd()}"
    )


def _readings(source: str) -> list[tuple[str, str | None]]:
    """Return the possible meanings of `source`, with and without a version, because a path can also contain an @."""
    match = _VERSION.fullmatch(source)
    named: list[tuple[str, str | None]] = [] if match is None else [(match[1], match[2])]
    return named if "://" in source and named else [(source, None), *named]
