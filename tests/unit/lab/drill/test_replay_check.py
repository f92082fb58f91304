"""A drill's replay is compared with each checkpoint that a server began with, and with the newest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from doll.ps.checkpointing import decode_snapshot, encode_snapshot
from doll.storage.checkpoints import Checkpoint
from logged_runs import LoggedRun
from memory_stores import MemoryCheckpointStore
from msgspec import structs

from doll_lab.drill.replay_check import ReplayResult, check_replay

pytestmark = pytest.mark.slow  # loads torch


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore("replayed", keep=100)


def newest(store: MemoryCheckpointStore) -> Checkpoint:
    held = store.load_newest(None)
    assert held is not None
    return held


def three_terms(folder: Path, store: MemoryCheckpointStore) -> LoggedRun:
    """The first server is killed, the second one ends on SIGTERM, and the third one is killed."""
    for seed in (1, 2, 3):
        run = LoggedRun(folder, store, "training.policy.group_size=7", seed=seed)
        run.play(10)
        assert max(run.sizes) > 1
        (run.terminate if seed == 2 else run.close)()
    return run


def check(run: LoggedRun, checkpoint: Checkpoint | None) -> ReplayResult:
    return check_replay(run.config, run.path.parent, checkpoint)


def test_it_finds_a_run_of_three_servers_equal(tmp_path: Path, store: MemoryCheckpointStore) -> None:
    run = three_terms(tmp_path, store)
    (tmp_path / "ps-4.log").touch()  # a server that was killed at its start
    result = check(run, newest(store))
    assert result.differences == ()
    assert (result.terms, result.checkpoints) == (3, 3)  # what the second and the third began with, and the newest
    assert result.versions >= 30


def test_it_finds_one_bit_of_the_weights_or_of_the_momentum(tmp_path: Path, store: MemoryCheckpointStore) -> None:
    run = three_terms(tmp_path, store)
    held = newest(store)
    assert len(held.tensors) > 1
    for name, tensor in held.tensors.items():
        changed = np.array(tensor)
        changed.view(np.uint8).reshape(-1)[0] ^= 1
        other = Checkpoint(
            job=held.job, fingerprint=held.fingerprint, term=held.term, version=held.version, state=held.state,
            tensors={**held.tensors, name: changed},
        )  # fmt: skip
        (difference,) = check(run, other).differences
        assert difference == f"the tensors of version {held.version} of term 3 differ"


def test_it_finds_another_state_and_versions_that_are_not_made(tmp_path: Path, store: MemoryCheckpointStore) -> None:
    run = three_terms(tmp_path, store)
    held = newest(store)

    def changed(version: int, state: bytes) -> Checkpoint:
        return Checkpoint(
            job=held.job, fingerprint=held.fingerprint, term=held.term, version=version, state=state,
            tensors=held.tensors,
        )  # fmt: skip

    snapshot = decode_snapshot(held)
    later = structs.replace(snapshot, elapsed_s=snapshot.elapsed_s + 1, counters={"requeued": 7})
    assert check(run, changed(held.version, encode_snapshot(later))).differences == ()  # of a SIGTERM
    earlier = structs.replace(snapshot, elapsed_s=snapshot.elapsed_s - 1)
    other = structs.replace(later, applied=(*snapshot.applied[:-1], snapshot.applied[-1] + 1))
    for state in (b"other", encode_snapshot(earlier), encode_snapshot(other)):
        (difference,) = check(run, changed(held.version, state)).differences
        assert "state" in difference
    (difference,) = check(run, changed(1000, held.state)).differences
    assert "does not make version 1000 of term 3" in difference
    assert check(run, None).differences == ("there is no checkpoint to compare with",)


def test_a_log_that_is_damaged_or_missing_is_a_difference(tmp_path: Path, store: MemoryCheckpointStore) -> None:
    run = three_terms(tmp_path, store)
    run.path.write_bytes(b"\x04\x00\x00\x00oops")
    differences = check(run, newest(store)).differences
    assert any("ps-3.log: " in difference for difference in differences)
    run.path.unlink()
    (difference,) = check(run, newest(store)).differences
    assert "does not make" in difference
