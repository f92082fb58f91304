"""The newest version of a job, wherever it is, and why there may be a newer one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import record_builders
from doll.errors import CheckpointError, ServiceUnavailableError
from doll.evaluation.stored_weights import Place, place_of
from doll.evaluation.weight_follower import BLOBS, CHECKPOINTS, WeightFollower
from doll.storage.blobs import Latest, encode_blob, encode_latest, latest_key, weights_key
from memory_stores import MemoryBlobs
from serving_rig import ServingRig

pytestmark = pytest.mark.slow  # loads torch


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ServingRig]:
    with ServingRig(tmp_path) as rig:
        rig.blobs = MemoryBlobs()  # type: ignore[assignment]
        rig.blobs.close = lambda: None  # type: ignore[method-assign]
        yield rig


def memory(rig: ServingRig) -> MemoryBlobs:
    assert isinstance(rig.blobs, MemoryBlobs)
    return rig.blobs


class Followed:
    """A follower, and what it has given last; each look is a second after the one before it."""

    def __init__(self, rig: ServingRig, **more: Any) -> None:
        self.now_s = 0.0
        self.follower = WeightFollower(
            rig.config, rig.blobs, rig.run_folder, rig.model, clock=lambda: self.now_s, **more
        )
        self.place: Place | None = None

    def look(self) -> Place | None:
        self.now_s += 1.0
        stored = self.follower.newest(self.place)
        if stored is None:
            return None
        assert stored.weights[0] == stored.version
        self.place = place_of(stored)
        return self.place


def test_checkpoints_say_which_run_it_is_and_blobs_are_read_then(rig: ServingRig) -> None:
    followed = Followed(rig)
    assert followed.look() is None
    rig.save(3, samples=48)
    rig.publish(5)
    assert followed.look() == (1, 3)
    assert followed.look() == (1, 5)
    assert followed.look() is None
    rig.save(7)
    assert followed.look() is None, "what is published is the newest, while something is"
    memory(rig).wipe()
    assert followed.look() == (1, 7)
    rig.save(8)
    rig.publish(7)
    assert followed.look() is None
    assert followed.follower.unavailable == {}


def test_a_record_says_which_run_it_is_too(rig: ServingRig) -> None:
    rig.publish(5)
    followed = Followed(rig)
    assert followed.look() is None
    record = record_builders.term_started(1)
    followed.follower.feed(msgspec.structs.replace(record, run_id="r1"))
    assert followed.look() == (1, 5)


def test_what_an_earlier_term_has_published_is_void(rig: ServingRig) -> None:
    rig.save(3)
    followed = Followed(rig)
    assert followed.look() == (1, 3)
    rig.publish(6)
    followed.follower.feed(record_builders.update(2, 4))
    assert followed.look() is None
    rig.publish(4, term=2)
    assert followed.look() == (2, 4)


def test_what_an_earlier_run_has_left_is_not_read(rig: ServingRig) -> None:
    rig.save(3)
    followed = Followed(rig, after_term=1)
    assert followed.look() is None
    rig.store.claim_term()
    rig.save(1, term=2)
    assert followed.look() == (2, 1)


def test_while_the_blob_store_is_away_checkpoints_are_read(rig: ServingRig) -> None:
    rig.save(3)
    followed = Followed(rig)
    followed.look()
    rig.save(4)
    memory(rig).fail_next(ServiceUnavailableError("Redis is away"))
    assert followed.look() == (1, 4)
    assert followed.follower.unavailable == {BLOBS: "Redis is away"}
    rig.publish(9)
    assert followed.look() == (1, 9)
    assert followed.follower.unavailable == {}


def test_a_damaged_blob_is_not_taken(rig: ServingRig) -> None:
    rig.save(3)
    followed = Followed(rig)
    followed.look()
    scope = "line:r1"
    blob = bytearray(b"".join(encode_blob(np.ones(3, np.float32), job=scope, kind="w", version=5)))
    blob[-1] ^= 1
    rig.blobs.put(weights_key(scope, 1, 5), [bytes(blob)], 60.0)
    rig.blobs.put(latest_key(scope), encode_latest(Latest(term=1, version=5, key="k")), 60.0)
    assert followed.look() is None
    assert "checksum" in followed.follower.unavailable[BLOBS]


def test_checkpoints_that_cannot_be_read_are_said(rig: ServingRig) -> None:
    rig.save(3)
    (path,) = rig.run_folder.joinpath("checkpoints").glob("*.doll")
    path.write_bytes(path.read_bytes()[:-1])
    followed = Followed(rig)
    assert followed.look() is None
    assert "is whole" in followed.follower.unavailable[CHECKPOINTS]


def test_a_version_by_its_number(rig: ServingRig) -> None:
    for version in (1, 2, 3):
        rig.save(version)
    followed = Followed(rig)
    assert followed.follower.load(2).weights[0] == 2
    with pytest.raises(CheckpointError, match="expected a version that is kept"):
        followed.follower.load(4)
    rig.publish(4)
    followed.follower.feed(record_builders.update(1, 4))
    followed.look()
    assert followed.follower.load(4).weights[0] == 4
