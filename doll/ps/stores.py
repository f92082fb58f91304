"""The one place that knows where a job's checkpoints are: in a folder, or in S3. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from doll.ps.file_store import FileStore

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.ps.checkpoints import CheckpointStore

S3 = "s3://"


def checkpoint_place(config: JobConfig, run_folder: Path) -> Path | str:
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
    place, keep = checkpoint_place(config, run_folder), config.checkpoint.keep
    if isinstance(place, Path):
        return FileStore(place, config.job, keep=keep)
    from doll.ps.s3_store import S3Store

    return S3Store(place, config.job, keep=keep)
