"""`doll rollback` at the checkpoint store: the earlier model goes on, to the bit, and a replay makes it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from doll.config import JobConfig, parse
from doll.errors import ConfigError, FencedError, VersionUnknownError
from doll.ps.checkpointing import decode_snapshot
from doll.ps.event_log import replay
from doll.ps.regrid import regrid
from doll.ps.rollback import rollback
from doll.ps.tables.bounded_table import renumbered
from doll.storage.checkpoints import Checkpoint
from logged_runs import JOB, LoggedRun
from memory_stores import MemoryCheckpointStore

pytestmark = pytest.mark.slow  # loads torch


def checkpoint(store: MemoryCheckpointStore, version: int | None = None) -> Checkpoint:
    held = store.load_newest(None, version)
    assert held is not None
    return held


def played(folder: Path, store: MemoryCheckpointStore, *overrides: str, seed: int = 1) -> JobConfig:
    """One server; its replay makes the same model, to the bit."""
    run = LoggedRun(folder, store, *overrides, seed=seed)
    run.play(9)
    run.close()
    replayed = {}
    ordered = list(
        replay(run.config, run.path, on_update=lambda at, parts: replayed.update({at: parts.updater.weights.tobytes()}))
    )
    assert {version: replayed[version] for version in run.weights} == run.weights
    newest = checkpoint(store)  # not the last that was ordered, where the server ended while that was saved
    assert newest.state == next(each.state for each in ordered if each.version == newest.version)
    return run.config


@pytest.mark.parametrize("skip", [False, True])
def test_the_earlier_model_is_the_newest_with_another_number(tmp_path: Path, skip: bool) -> None:
    store = MemoryCheckpointStore("replayed", keep=100)
    config = played(tmp_path, store)
    newest = checkpoint(store)
    to = store.versions()[1][1]
    then = checkpoint(store, to)
    result = rollback(config, store, to, skip=skip)
    now = checkpoint(store)
    assert (now.version, now.term) == (newest.version + 1, result.term)
    assert now.tensors.keys() == then.tensors.keys()
    for name, tensor in then.tensors.items():
        np.testing.assert_array_equal(now.tensors[name], tensor)
    before, after, last = (decode_snapshot(item) for item in (then, now, newest))
    ends = [
        tuple(origin + 4 * count for origin, count in zip(item.origins, item.applied, strict=True))
        for item in (before, last)
    ]
    assert after.origins == result.origins == ends[skip]
    assert result.records == sum(ends[1]) - sum(ends[0])
    assert (after.samples_total, after.run_id, after.grid) == (before.samples_total, last.run_id, 1)
    assert after.version - after.empty_updates == before.version - before.empty_updates
    said = "are skipped" if skip else "are learned again"
    assert f"from version {newest.version} to {to}, which is version {now.version} now" in result.text()
    assert said in result.text()
    played(tmp_path, store, seed=2)
    assert checkpoint(store).version > now.version
    # What was left cannot be gone back to, and what was gone through can.
    for left in (newest.version, store.versions()[2][1]):
        with pytest.raises(VersionUnknownError, match=f"got {left}, which was left by a rollback"):
            rollback(config, store, left, skip=skip)
    again = rollback(config, store, now.version, skip=not skip)
    assert decode_snapshot(checkpoint(store)).grid == 2
    assert again.version == checkpoint(store).version


def test_a_rollback_over_a_regrid_keeps_todays_settings(tmp_path: Path) -> None:
    store = MemoryCheckpointStore("replayed", keep=100)
    played(tmp_path, store)
    to = checkpoint(store).version
    changes = ("data.batch_size=8", "training.optimizer={name: adam}")
    regrid(parse(JOB, changes), store)
    config = played(tmp_path, store, *changes)
    grid = decode_snapshot(checkpoint(store)).grid
    result = rollback(config, store, store.versions()[1][1], skip=False)
    assert result.to < to
    after = decode_snapshot(checkpoint(store))
    assert (after.grid, after.records_per_batch) == (grid + 1, 8)
    assert "the state of the optimizer begins again (training.optimizer.name: expected sgd, got adam" in result.text()
    played(tmp_path, store, *changes, seed=5)


def test_what_cannot_be_is_refused_and_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    store = MemoryCheckpointStore("replayed", keep=100)
    config = parse(JOB)
    with pytest.raises(VersionUnknownError, match="no checkpoint of job replayed"):
        rollback(config, store, 3, skip=True)
    played(tmp_path, store)
    before, claimed = store.versions(), store.newest_term()
    newest = before[-1][1]
    for to, error, words in (
        (10_000, VersionUnknownError, "expected a version that is kept"),
        (newest, ConfigError, f"expected a version before the newest one, {newest}, got {newest}"),
    ):
        with pytest.raises(error, match=words):
            rollback(config, store, to, skip=True)
    other = parse(JOB, ["task.args.hidden=[9]"])
    with pytest.raises(ConfigError, match=r"doll rollback cannot change this: parameters: "):
        rollback(other, store, before[0][1], skip=True)
    assert (store.versions(), store.newest_term()) == (before, claimed), "nothing was claimed"
    claim = store.claim_term

    def claimed_twice(above: int = 0) -> int:
        term = claim(above)
        claim()  # a standby takes over
        return term

    store.claim_term = claimed_twice  # type: ignore[method-assign]
    with pytest.raises(FencedError):
        rollback(config, store, before[0][1], skip=True)
    assert store.versions() == before


def test_rows_of_a_bounded_table_are_as_old_as_before() -> None:
    tensors: dict[str, npt.NDArray[Any]] = {
        "table.ids.bounded": np.array([1, 40, 9], np.int64), "table.ids.last_touch": np.array([38, -1, 40], np.int64),
        "table.ids.values": np.zeros((3, 1), np.float32),
    }  # fmt: skip
    moved = renumbered(tensors, "ids", 60)
    assert moved["table.ids.bounded"].tolist() == [1, 100, 9]
    assert moved["table.ids.last_touch"].tolist() == [98, -1, 100]
    assert moved.keys() == {"table.ids.bounded", "table.ids.last_touch"}
