"""What a server publishes of its changes, and the weights that a worker makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import record_builders
from doll.consumers.compute.weights_ahead import DeltaReader
from doll.errors import BlobError
from doll.ps.model.model_host import DeltaWriter
from doll.records.control import Grant
from doll.storage.blobs import delta_key
from doll.storage.deltas import Layout, changes, decode_changes
from fuzzing import seeds
from memory_stores import MemoryBlobs

pytestmark = pytest.mark.slow  # loads torch

LAYOUT = Layout(numel=520, num_parameters=500)


def grant(version: int, term: int = 1) -> Grant:
    return record_builders.grant_of(
        term=term, worker=0, session=1, first=version, grant_ids=(1,), version=version, min_version=version, key="w"
    )


class Rig:
    """A server's weights, and a worker's copy of them."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.blobs = MemoryBlobs()
        self.weights = self.rng.normal(size=LAYOUT.numel).astype(np.float32)
        self.writer = DeltaWriter("unit", 1, self.blobs, 60.0, LAYOUT.num_parameters)
        self.reader = DeltaReader("unit", self.blobs, LAYOUT)
        self.versions: dict[int, np.ndarray] = {}
        self.publish(0)

    def publish(self, version: int, num_changed: int = 0, *, with_tail: bool = False) -> None:
        ids = self.rng.choice(LAYOUT.num_parameters, num_changed, replace=False)
        self.weights[ids] = self.rng.normal(size=num_changed)
        if with_tail:
            # A counter of batches, as its bytes: no number.
            self.weights[-2:] = np.frombuffer(np.int64(-version).tobytes(), np.float32)
        self.writer.put(self.weights, version)
        self.versions[version] = self.weights.copy()

    def read(self, version: int) -> None:
        """As a worker does: the changes, or else the whole."""
        weights = self.reader.read(grant(version))
        if weights is None:
            self.reader.keep(self.versions[version], grant(version))
        else:
            assert weights.tobytes() == self.versions[version].tobytes()


@pytest.mark.parametrize("seed", seeds(40))
def test_changes_make_the_version_to_the_bit_or_the_whole_is_read(seed: int) -> None:
    rig = Rig(seed)
    rng, newest = rig.rng, 0
    num_read = 0
    rig.read(0)
    for _ in range(60):
        newest += int(rng.integers(1, 3))
        rig.publish(newest, int(rng.integers(0, 330)), with_tail=bool(rng.random() < 0.3))
        if rng.random() < 0.1:
            rig.blobs.delete(delta_key("unit", 1, newest))
        if rng.random() < 0.5:
            rig.read(newest)
            num_read += rig.reader.num_bytes > 0
    assert num_read > 5


def test_the_zero_of_a_number_is_a_change() -> None:
    rig = Rig()
    rig.read(0)
    rig.weights[3] = 0.0
    rig.publish(1)
    weights = rig.reader.read(grant(1))
    assert weights is not None
    assert weights[3] == 0.0


def test_changes_that_are_longer_than_the_whole_are_not_published() -> None:
    rig = Rig()
    rig.publish(1, num_changed=301)
    assert rig.blobs.get(delta_key("unit", 1, 1)) is None
    rig.publish(2, num_changed=300)
    assert rig.blobs.get(delta_key("unit", 1, 2)) is not None


def test_a_worker_far_behind_reads_the_whole_and_not_more_bytes_of_changes() -> None:
    rig = Rig()
    rig.read(0)
    for version in range(1, 9):
        rig.publish(version, num_changed=200)
    assert rig.reader.read(grant(8)) is None
    rig.read(8)
    assert rig.reader.read(grant(8)) is not None, "the whole was kept"


def test_weights_of_another_term_are_no_start() -> None:
    rig = Rig()
    rig.read(0)
    rig.publish(1, num_changed=2)
    assert rig.reader.read(grant(1, term=2)) is None


@pytest.mark.parametrize("damage", ["torn", "changed", "another version", "not finite"])
def test_a_damaged_delta_is_refused_and_changes_nothing(damage: str) -> None:
    rig = Rig()
    rig.read(0)
    rig.publish(1, num_changed=3)
    rig.publish(2, num_changed=3)
    key = delta_key("unit", 1, 1)
    blob = rig.blobs.get(key)
    assert blob is not None
    wrong = bytearray(blob)
    if damage == "torn":
        wrong = wrong[:-1]
    elif damage == "changed":
        wrong[-1] ^= 1
    elif damage == "another version":
        wrong = bytearray(rig.blobs.get(delta_key("unit", 1, 2)) or b"")
    else:
        bad = rig.versions[1].copy()
        bad[0] = np.nan
        wrong = bytearray(b"".join(changes(rig.versions[0], bad, LAYOUT, job="unit", since=0, version=1) or []))
    rig.blobs.put(key, [bytes(wrong)], 60.0)
    assert rig.reader.read(grant(2)) is None
    rig.blobs.put(key, [blob], 60.0)
    weights = rig.reader.read(grant(2))
    assert weights is not None, "what was read of the damaged chain has changed nothing"
    assert weights.tobytes() == rig.versions[2].tobytes()


def test_a_delta_names_the_version_below_its_own_that_it_is_compared_with() -> None:
    before, after = np.zeros(520, np.float32), np.ones(520, np.float32)
    before[10:] = 1.0
    blob = b"".join(changes(before, after, LAYOUT, job="unit", since=4, version=5) or [])
    delta = decode_changes(blob, LAYOUT, job="unit", version=5)
    assert (delta.since, list(delta.ids)) == (4, list(range(10)))
    wrong = b"".join(changes(before, after, LAYOUT, job="unit", since=5, version=5) or [])
    with pytest.raises(BlobError, match="below it"):
        decode_changes(wrong, LAYOUT, job="unit", version=5)
