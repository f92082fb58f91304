"""The kept versions of a job, for `doll versions`: read from its checkpoints, its records and its run folder."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from doll.errors import CheckpointError, ServiceUnavailableError, VersionUnknownError
from doll.kafka.reader import Tail
from doll.monitor.state.csv_file import read_rows
from doll.monitor.state.history import MetricTable
from doll.monitor.state.progress import ProgressModel
from doll.monitor.state.table_changes import table_changes
from doll.monitor.state.version_lines import (
    Row,
    VersionDiff,
    VersionLine,
    VersionRecords,
    changes_between,
    version_line,
)
from doll.records.control import ProvisionDecision
from doll.run.status import history_of, reachable_kafka
from doll.run.target import Target, refuse_shared_checkpoints
from doll.storage.checkpoints import Checkpoint, CheckpointStore, resolve_version
from doll.storage.stores import open_store
from doll.storage.version_marks import VersionMarks, checked_alias
from doll.telemetry import get_logger

log = get_logger(__name__)

_WEIGHTS = "weights"


def list_versions(target: Target) -> list[VersionLine]:
    """Return the kept versions, oldest first. If two versions have the same number, only the newer one is returned.

    Raises:
        CheckpointError: the store cannot be read.
    """
    store, records = open_store(target.config, target.run.path), job_records(target)
    marks = store.read_marks()
    newest = {item.version: item for item in store.stored()}
    lines = []
    for item in sorted(newest.values()):
        try:
            lines.append(version_line(item, store.read_head(*item.key), marks, records))
        except VersionUnknownError:  # deleted in the meantime: leave it out
            continue
        except CheckpointError as exc:
            log.warning("version_left_out", version=item.version, error=str(exc))
    return lines


def show_version(target: Target, name: str) -> VersionLine:
    """Return the line of one version.

    Raises:
        VersionUnknownError: no version has this name.
        CheckpointError: the version cannot be read, or is damaged.
    """
    store = open_store(target.config, target.run.path)
    return _line(store, resolve_version(store, name), job_records(target))


def _line(store: CheckpointStore, version: int, records: VersionRecords) -> VersionLine:
    whole = store.load_newest(None, version, in_place=True, with_parts=False)
    item = next((item for item in store.stored() if whole is not None and item.key == (whole.term, version)), None)
    if item is None:
        resolve_version(store, str(version))  # raises an error that lists the existing versions
        raise VersionUnknownError(f"{store.location}: version {version} was deleted while it was read")
    return version_line(item, store.read_head(*item.key), store.read_marks(), records)


def diff_versions(target: Target, a: str, b: str) -> VersionDiff:
    """Return the difference of two versions.

    Raises:
        VersionUnknownError: no version has such a name.
        CheckpointError: a version cannot be read.
    """
    store, records = open_store(target.config, target.run.path), job_records(target)
    versions = [resolve_version(store, name) for name in (a, b)]
    lines = [_line(store, version, records) for version in versions]
    before, after = (store.load_newest(None, version, in_place=True) for version in versions)
    return VersionDiff(
        a=lines[0], b=lines[1], changes=changes_between(*lines),
        distances=_distances(_tensors(before), _tensors(after)),
        tables={} if before is None or after is None else table_changes(before.tensors, after.tensors),
    )  # fmt: skip


def _tensors(checkpoint: Checkpoint | None) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights by name, if the checkpoint contains their names."""
    if checkpoint is None:
        return {}
    weights = checkpoint.tensors.get(_WEIGHTS, np.zeros(0, np.float32))
    with contextlib.suppress(ValueError):
        return checkpoint.layout.tensors(weights)
    return {_WEIGHTS: weights}


def _distances(
    a: Mapping[str, np.ndarray[Any, Any]], b: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, tuple[float, float]]:
    distances = {}
    for name, before in a.items():
        if name in b and b[name].shape == before.shape and before.dtype == np.float32:
            change = np.subtract(b[name], before, dtype=np.float64)
            distances[name] = float(np.linalg.norm(change)), float(np.linalg.norm(before.astype(np.float64)))
    return distances


def pin(target: Target, name: str, *, pinned: bool) -> tuple[int, VersionMarks]:
    """Pin a version, or remove its pin; return its number and the new marks.

    Raises:
        VersionUnknownError: no version has this name.
        ConfigError: the pin to remove does not exist; or the checkpoints belong to another run folder.
        CheckpointError: the version to pin is damaged, or the marks cannot be changed.
    """
    store = _own_store(target)
    version = resolve_version(store, name)
    return version, store.change_marks(lambda marks: marks.with_pin(version) if pinned else marks.without_pin(version))


def set_alias(target: Target, alias: str, name: str | None, reason: str = "") -> VersionMarks:
    """Make `alias` refer to the version `name`, or delete the alias if `name` is None. Return the new marks.

    `reason` is kept until the alias moves again.

    Raises:
        ConfigError: `alias` is not valid; the alias to delete does not exist; or the checkpoints belong to another run
            folder.
        VersionUnknownError: no version has this name.
        CheckpointError: the version is damaged, or the marks cannot be changed.
    """
    store = _own_store(target)
    if name is None:
        return store.change_marks(lambda marks: marks.without_alias(alias))
    checked_alias(alias)
    version = resolve_version(store, name)
    return store.change_marks(lambda marks: marks.with_alias(alias, version, reason))


def freeze(target: Target, alias: str, reason: str | None) -> VersionMarks:
    """Make gates leave an alias where it is, with a reason; None: they may move it again. Return the new marks.

    Raises:
        ConfigError: `alias` is not valid; or the checkpoints belong to another run folder.
        CheckpointError: the marks cannot be changed.
    """
    checked_alias(alias)
    return _own_store(target).change_marks(lambda marks: marks.with_freeze(alias, reason))


def _own_store(target: Target) -> CheckpointStore:
    refuse_shared_checkpoints(target.run, target.config)
    return open_store(target.config, target.run.path)


def job_records(target: Target) -> VersionRecords:
    """Return the job's records from Kafka; if Kafka is unavailable or the run has ended, the records in its folder."""
    if not (target.is_run_folder and target.run.report.exists()):
        with contextlib.suppress(ServiceUnavailableError):
            return _from_kafka(target)
    folder = target.run.path
    return VersionRecords(updates=_rows_of(folder / "updates.csv"), evaluations=_rows_of(folder / "evaluations.csv"))


def _from_kafka(target: Target) -> VersionRecords:
    target, services = reachable_kafka(target)
    config = target.config
    model = ProgressModel(config, 0.0)
    spent: list[tuple[float, float]] = []
    with Tail(config, services, (config.topic("updates"), config.topic("metrics"))) as tail:
        for record in history_of(target, tail):
            model.feed(record)
            if isinstance(record, ProvisionDecision):
                spent.append((record.time_s, record.spent_usd))
    history = model.history
    return VersionRecords(
        updates=_rows(history.updates), evaluations=_rows(history.evaluations), spent_usd=sorted(spent)
    )  # fmt: skip


def _rows(table: MetricTable) -> list[Row]:
    return [table.row(index) for index in range(len(table))]


def _rows_of(path: Path) -> list[Row]:
    try:
        return [*read_rows(path)]
    except FileNotFoundError:
        return []
