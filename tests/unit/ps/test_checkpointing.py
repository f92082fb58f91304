"""When a checkpoint is written, and what happens where that fails."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from doll.errors import CheckpointError, FencedError
from doll.ps.checkpointing import CheckpointWriter, decode_snapshot, encode_snapshot
from doll.storage.checkpoints import Checkpoint
from engine_world import World
from memory_stores import MemoryCheckpointStore

pytestmark = pytest.mark.slow  # loads torch

RETRY_TIMEOUT_S = 60.0


def checkpoint(version: int = 4, state: bytes = b"") -> Checkpoint:
    return Checkpoint(job="unit", fingerprint="f", term=1, version=version, state=state, tensors={})


class Rig:
    def __init__(self) -> None:
        self.now, self.acknowledged = 0.0, 0
        self.store = MemoryCheckpointStore("unit")
        self.store.claim_term()
        self.writer = CheckpointWriter(
            self.store, acknowledged=lambda: self.acknowledged, retry_timeout_s=RETRY_TIMEOUT_S, clock=lambda: self.now
        )

    def poll_until_saved(self) -> int | None:
        """Poll until the save under way is done."""
        deadline_s = time.monotonic() + 60
        while True:
            version = self.writer.poll()
            if version is not None or self.writer._saving is None:
                return version
            assert time.monotonic() < deadline_s


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.writer.close()


def test_a_checkpoint_waits_for_the_records_of_its_updates(rig: Rig) -> None:
    rig.writer.order(checkpoint(), after_records=3)
    rig.acknowledged = 2
    assert rig.writer.poll() is None
    assert rig.writer._saving is None
    rig.acknowledged = 3
    assert rig.poll_until_saved() == 4
    assert rig.store.saved == [(1, 4)]
    assert rig.writer.poll() is None, "it is reported once"


def test_a_failed_save_is_tried_again_after_a_while(rig: Rig) -> None:
    rig.store.fail_next(CheckpointError("disk full"))
    rig.writer.order(checkpoint(), after_records=0)
    assert rig.poll_until_saved() is None
    assert rig.writer.poll() is None
    assert rig.writer._saving is None, "not yet"
    rig.now += 1.0
    assert rig.poll_until_saved() == 4


def test_a_store_that_fails_for_too_long_is_an_error_and_success_begins_the_time_anew(rig: Rig) -> None:
    for version in (4, 5):
        rig.store.fail_next(CheckpointError("disk full"))
        rig.writer.order(checkpoint(version), after_records=0)
        assert rig.poll_until_saved() is None
        rig.now += RETRY_TIMEOUT_S
        assert rig.poll_until_saved() == version
        rig.now += RETRY_TIMEOUT_S
    rig.store.fail_next(*[CheckpointError("disk full")] * 2)
    rig.writer.order(checkpoint(6), after_records=0)
    assert rig.poll_until_saved() is None
    rig.now += RETRY_TIMEOUT_S + 1.0
    with pytest.raises(CheckpointError, match="disk full"):
        rig.poll_until_saved()


def test_a_newer_server_is_an_error_at_once(rig: Rig) -> None:
    rig.store.claim_term()
    rig.writer.order(checkpoint(), after_records=0)
    with pytest.raises(FencedError):
        rig.poll_until_saved()


def test_waiting_ignores_a_failure_and_reports_a_newer_server(rig: Rig) -> None:
    rig.writer.wait()  # nothing is under way
    rig.store.fail_next(CheckpointError("disk full"))
    rig.writer.order(checkpoint(), after_records=0)
    rig.writer.poll()
    rig.writer.wait()
    rig.poll_until_saved()
    rig.now += 1.0
    rig.store.fail_next(FencedError("term 2 has claimed the job"))
    rig.writer.poll()
    with pytest.raises(FencedError):
        rig.writer.wait()


def test_a_state_that_this_build_does_not_read_is_refused() -> None:
    with pytest.raises(CheckpointError, match="holds no engine state that this build reads"):
        decode_snapshot(checkpoint(state=b"\x81\xa7version\xa3one"))


def test_a_snapshot_survives_its_checkpoint() -> None:
    world = World("doll")
    snapshot = world.engine.snapshot(world.now)
    assert decode_snapshot(checkpoint(state=encode_snapshot(snapshot))) == snapshot
