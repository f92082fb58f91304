"""The contract of `ModelHost`, for every adapter: gradients in, versions out, and nothing torn is ever applied."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doll.config import JobConfig, SgdConfig, parse
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import DivergedError, Optimizer
from doll.ps.engine.events import ApplyUpdate, FetchGradient, GradientFetched, GradientLost
from doll.ps.model.model_host import ModelHost
from doll.storage.blobs import Blobs, blob_info, decode_blob, decode_latest, encode_blob, latest_key
from doll.storage.contributions import Compressor
from doll.storage.shm_blobs import ShmBlobs
from memory_stores import MemoryBlobs
from pushes import applied_set, push_of

pytestmark = pytest.mark.slow  # loads torch

JOB = """
job: unit
task: {class: "examples.synthetic.task:Gaussian"}
data: {workers: 2, batch_size: 4}
blobs: {keep_versions: 2}
"""
LR = 0.5


Make = Callable[[JobConfig, int, Blobs], ModelHost]


def local(config: JobConfig, term: int, blobs: Blobs) -> ModelHost:
    torch.manual_seed(7)
    return ModelHost(config, term, Optimizer(FlatModel(torch.nn.Linear(4, 3)), SgdConfig(lr=LR)), blobs)


HOSTS: dict[str, Make] = {"local": local}


class WipedShm(ShmBlobs):
    """In shared memory, every blob in a file that is used again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, limit_bytes=10**6, fallback=MemoryBlobs(), reused_from_bytes=1, mapped_from_bytes=1)
        self.folder = folder

    def wipe(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()


class Rig:
    def __init__(self, make: Make, blobs: MemoryBlobs | WipedShm) -> None:
        self.blobs = blobs
        self.make = make
        self.host = make(parse(JOB), 3, self.blobs)

    def store(self, number: int, value: float = 1.0, *, version: int = 0) -> FetchGradient:
        """A worker's answer to grant `number`."""
        key = f"g{number}"
        gradient = np.full(self.host.num_values, value, np.float32)
        self.blobs.put(key, encode_blob(gradient, job="unit", kind="g", version=version), 60.0)
        return FetchGradient(number, key, version, in_order=False)

    def published(self, key: str, version: int) -> np.ndarray:
        blob = self.blobs.get(key)
        assert blob is not None
        return decode_blob(blob, job="unit", kind="w", version=version, numel=self.host.num_values)


@pytest.fixture(params=HOSTS)
def make(request: pytest.FixtureRequest) -> Make:
    return HOSTS[request.param]


@pytest.fixture(params=["memory", "shm"])
def rig(request: pytest.FixtureRequest, make: Make, tmp_path: Path) -> Rig:
    return Rig(make, MemoryBlobs() if request.param == "memory" else WipedShm(tmp_path / "blobs"))


def update(version: int, *numbers: int, scale: float = 0.125, samples: int = 4) -> ApplyUpdate:
    pushes = [
        push_of(
            worker=0, session=1, batch=number, term=3, grant_id=number, version=0, key=f"g{number}", n_samples=samples
        )
        for number in numbers
    ]
    return ApplyUpdate(version, tuple(map(applied_set, pushes)), scale, 0, 0)


def test_a_version_is_made_of_the_gradients_that_were_fetched(rig: Rig) -> None:
    before = rig.published(rig.host.publish(0), 0).copy()
    for number, value in ((1, 2.0), (2, 6.0)):
        order = rig.store(number, value)
        outcome = rig.host.fetch(order)
        assert outcome.event == GradientFetched(grant_id=number)
        assert outcome.blob == rig.blobs.get(order.key)
    assert rig.host.apply(update(1, 1, 2)) == 8
    np.testing.assert_array_equal(rig.published(rig.host.publish(1), 1), before - np.float32(LR))
    rig.host.tidy()
    assert (rig.blobs.get("g1"), rig.blobs.get("g2")) == (None, None)


def test_every_version_and_checkpoint_is_the_same_with_and_without_shared_memory(make: Make, tmp_path: Path) -> None:
    """The versions are the same also while readers hold old ones, a checkpoint is written, and the folder is wiped."""
    rng = random.Random(3)
    plain, shared = Rig(make, MemoryBlobs()), Rig(make, WipedShm(tmp_path / "blobs"))
    kept: list[tuple[Any, bytes]] = []
    number = 0
    for version in range(60):
        if rng.random() < 0.7:  # with asp, not each version is published
            keys = [rig.host.publish(version) for rig in (plain, shared)]
            if rng.random() < 0.1:
                shared.blobs.wipe()
                shared.host.republish(version)
            ours, theirs = (rig.published(key, version) for rig, key in zip((shared, plain), keys, strict=True))
            assert ours.tobytes() == theirs.tobytes()
            if rng.random() < 0.5:
                kept.append((ours, ours.tobytes()))
        if rng.random() < 0.3:
            tensors = shared.host.tensors()
            assert tensors["weights"].tobytes() == plain.host.tensors()["weights"].tobytes()
            kept.append((tensors["weights"], tensors["weights"].tobytes()))
        count = rng.choice([0, 1, 1, 2, 3])
        numbers = range(number + 1, number + count + 1)
        number += count
        for rig in (plain, shared):
            for item in numbers:
                order = rig.store(item, item / 7.0, version=version)
                if rig is shared and rng.random() < 0.5:
                    order = FetchGradient(order.grant_id, order.key, version, in_order=True)
                assert isinstance(rig.host.fetch(order).event, GradientFetched)
            rig.host.apply(update(version + 1, *numbers))
        kept = kept[-rng.randrange(6) :]
        for array, expected in kept:
            assert array.tobytes() == expected


def test_weights_in_shared_memory_are_published_without_a_copy(make: Make, tmp_path: Path) -> None:
    rig = Rig(make, WipedShm(tmp_path / "blobs"))
    for version in range(1, 10):
        rig.host.fetch(rig.store(version, version=version - 1))
        rig.host.apply(update(version, version))
        kept_for_a_checkpoint = rig.host.tensors()["weights"]
        written = {path.stat().st_ino for path in rig.blobs.folder.iterdir()}  # type: ignore[union-attr]
        path = Path(rig.blobs._path(rig.host.publish(version)))  # type: ignore[union-attr]
        assert path.stat().st_ino in written
        del kept_for_a_checkpoint
        rig.host.tidy()
    files = {path.stat().st_ino for path in rig.blobs.folder.iterdir()}  # type: ignore[union-attr]
    assert len(files) <= 6  # two versions that are kept, the next one, a gradient, the pointer and the one before


@pytest.mark.parametrize("damage", ["missing", "torn", "another version", "another size"])
def test_a_gradient_that_is_not_whole_is_lost(rig: Rig, damage: str) -> None:
    order = rig.store(1)
    blob = rig.blobs.get(order.key)
    assert blob is not None
    damaged: dict[str, Any] = {
        "missing": None,
        "torn": blob[:-4],
        "another version": b"".join(
            encode_blob(np.ones(rig.host.num_values, np.float32), job="unit", kind="g", version=7)
        ),
        "another size": b"".join(encode_blob(np.ones(3, np.float32), job="unit", kind="g", version=0)),
    }
    rig.blobs.delete(order.key)
    if damaged[damage] is not None:
        rig.blobs.put(order.key, [damaged[damage]], 60.0)
    outcome = rig.host.fetch(order)
    assert isinstance(outcome.event, GradientLost)
    assert outcome.event.grant_id == 1
    assert outcome.blob is None


def test_publishing_writes_once_and_moves_the_pointer(rig: Rig) -> None:
    key = rig.host.publish(0)
    assert rig.host.publish(0) == key
    rig.host.tidy()
    pointer = rig.blobs.get(latest_key("unit"))
    assert pointer is not None
    latest = decode_latest(pointer)
    assert (latest.term, latest.version, latest.key) == (3, 0, key)
    rig.blobs.wipe()
    assert rig.host.publish(0) == key
    assert rig.blobs.get(key) is None, "it is not written a second time"
    assert rig.host.republish(0) == key
    rig.published(key, 0)
    rig.host.tidy()
    assert rig.blobs.get(latest_key("unit")) is not None


def test_old_versions_are_deleted(rig: Rig) -> None:
    keys = [rig.host.publish(version) for version in range(4)]
    assert all(rig.blobs.get(key) is not None for key in keys), "workers do not wait for it"
    rig.host.tidy()
    assert [rig.blobs.get(key) is not None for key in keys] == [False, False, True, True]  # blobs.keep_versions


def test_an_older_version_lives_until_no_grant_names_it(rig: Rig) -> None:
    def left() -> list[int]:
        rig.host.tidy(named)
        return [version for version, key in enumerate(keys) if rig.blobs.get(key) is not None]

    named = {0, 1, 5}
    keys = [rig.host.publish(version) for version in range(6)]
    assert left() == [0, 1, 4, 5]
    assert rig.host.publish(1) == keys[1], "a grant is sent again"
    rig.published(keys[1], 1)
    named.remove(1)
    rig.host.release(1)
    assert left() == [0, 4, 5]
    named.remove(5)
    rig.host.release(5)  # it is one of the newest
    assert left() == [0, 4, 5]
    keys += [rig.host.publish(version) for version in (6, 7)]
    assert left() == [0, 6, 7]


def test_of_older_versions_there_is_at_most_one_for_each_worker(rig: Rig) -> None:
    """Two workers with grants of eight versions."""
    keys = [rig.host.publish(version) for version in range(10)]
    rig.host.tidy(range(10))
    assert [version for version, key in enumerate(keys) if rig.blobs.get(key) is not None] == [6, 7, 8, 9]
    assert rig.host.publish(3) == keys[3]
    assert rig.blobs.get(keys[3]) is None, "the weights now are not stored as those of an older version"


def test_keys_of_another_term_are_other_keys(rig: Rig) -> None:
    """A server that was fenced must not overwrite its successor's weights."""
    assert rig.make(parse(JOB), 4, rig.blobs).publish(0) != rig.host.publish(0)


def test_a_dropped_gradient_is_deleted(rig: Rig) -> None:
    rig.host.drop(rig.store(1).key)
    assert rig.blobs.get("g1") is None


def test_a_successor_goes_on_from_the_tensors(rig: Rig) -> None:
    rig.host.fetch(rig.store(1, 3.0))
    rig.host.apply(update(1, 1))
    tensors = rig.host.tensors()
    successor = rig.make(parse(JOB), 4, rig.blobs)
    successor.load(tensors)
    assert rig.published(successor.publish(1), 1).tobytes() == rig.published(rig.host.publish(1), 1).tobytes()
    rig.host.fetch(rig.store(2, 3.0))
    rig.host.apply(update(2, 2))
    assert tensors["weights"].tobytes() != rig.host.tensors()["weights"].tobytes(), "tensors are copies"


def test_a_model_that_diverges_is_an_error(rig: Rig) -> None:
    rig.host.fetch(rig.store(1, float("nan")))
    with pytest.raises(DivergedError):
        rig.host.apply(update(1, 1))


def test_so_is_a_sparse_gradient_that_is_not_finite(rig: Rig) -> None:
    """Its batch is computed again; where that gives the same again and again, the model has diverged."""
    good = np.zeros(rig.host.num_values, np.float32)
    bad = good.copy()
    bad[3] = np.nan
    for _ in range(2):
        for _ in range(2):
            outcome = rig.host.fetch(store_sparse(rig, bad))
            assert isinstance(outcome.event, GradientLost)
            assert "NaN or infinity in 1 rows" in outcome.event.reason
        assert isinstance(rig.host.fetch(store_sparse(rig, good)).event, GradientFetched)
    for _ in range(2):
        rig.host.fetch(store_sparse(rig, bad))
    with pytest.raises(DivergedError, match="3 times in a row, a gradient is not finite"):
        rig.host.fetch(store_sparse(rig, bad))


def test_a_sparse_gradient_of_another_model_is_lost_and_not_added_in_part(rig: Rig) -> None:
    before = rig.published(rig.host.publish(0), 0).tobytes()
    values = np.zeros(1000, np.float32)
    values[[2, 900]] = 1.0
    outcome = rig.host.fetch(store_sparse(rig, values))
    assert isinstance(outcome.event, GradientLost)
    assert "parameters" in outcome.event.reason
    assert rig.host.tensors()["weights"].tobytes() == before


def store_sparse(rig: Rig, values: np.ndarray) -> FetchGradient:
    parts = Compressor("unit", len(values)).compress(values, version=0)
    assert blob_info(b"".join(parts)).kind == "p", "the sparse form"
    rig.blobs.put("g1", parts, 60.0)
    return FetchGradient(1, "g1", 0, in_order=False)
