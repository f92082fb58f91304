"""Which checkpoint store a job file's `checkpoint.folder` opens, and the provisioner's claims beside it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from doll.config import JobConfig
from doll.config.roles import CHECKPOINT_URLS, CheckpointConfig
from doll.errors import ConfigError
from doll.provisioner.lease import claims_of
from doll.storage.checkpoints import CheckpointStore
from doll.storage.file_checkpoints import FileCheckpointStore
from doll.storage.stores import CHECKPOINT_STORES, open_store
from doll.storage.version_marks import VersionHistory
from job_files import job
from memory_stores import MemoryCheckpointStore


def _job(folder: str | Path, base: Path) -> JobConfig:
    section = CheckpointConfig.model_construct(folder=folder, keep=2, history_s=60.0)
    return job(workers=1, folder=base).model_copy(update={"checkpoint": section})


def test_a_folder_holds_the_checkpoints_and_the_claims_beside_them(tmp_path: Path) -> None:
    config = _job(Path("saved"), tmp_path)
    store, claims = open_store(config, tmp_path), claims_of(config, tmp_path)
    assert isinstance(store, FileCheckpointStore)
    assert isinstance(claims, FileCheckpointStore)
    assert (store.folder, claims.folder) == (tmp_path / "saved", tmp_path / "saved" / "provision-j")


def test_a_new_store_is_one_opener_for_checkpoints_and_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, str | None, int, VersionHistory]] = []

    def opener(url: str, name: str | None, keep: int, history: VersionHistory) -> CheckpointStore:
        opened.append((url, name, keep, history))
        return MemoryCheckpointStore(name or "")

    monkeypatch.setitem(CHECKPOINT_STORES, "gs", opener)
    config = _job("gs://bucket/x/", tmp_path)
    assert isinstance(open_store(config, tmp_path), MemoryCheckpointStore)
    assert isinstance(cast("object", claims_of(config, tmp_path)), MemoryCheckpointStore)
    history = VersionHistory(3600, 60)
    assert opened == [
        ("gs://bucket/x/", config.job, 2, history), ("gs://bucket/x/provision-j", config.job, 2, history),
    ]  # fmt: skip


def test_a_scheme_without_a_store_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a folder or s3://, got gs://bucket/x"):
        open_store(_job("gs://bucket/x", tmp_path), tmp_path)


def test_the_job_file_takes_the_urls_that_a_store_opens() -> None:
    assert set(CHECKPOINT_URLS) == set(CHECKPOINT_STORES)
