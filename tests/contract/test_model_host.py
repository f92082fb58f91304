"""The contract of `ModelHost`, for every adapter: gradients in, versions out, and nothing torn is ever applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from doll.config import JobConfig, SgdConfig, parse
from doll.model import FlatModel
from doll.ps.events import ApplyUpdate, FetchGradient, GradientFetched, GradientLost
from doll.ps.local_host import LocalModelHost
from doll.ps.model_host import ModelHost
from doll.ps.optimizer import DivergedError, Optimizer
from doll.storage.blobs import decode_blob, decode_latest, encode_blob, latest_key
from doll.testing import MemoryBlobs
from pushes import applied_set, push_of

JOB = """
job: unit
task: {class: "doll.tasks.synthetic:Gaussian"}
data: {workers: 2, batch_size: 4}
blobs: {keep_versions: 2}
"""
LR = 0.5


def local(config: JobConfig, term: int, blobs: MemoryBlobs) -> ModelHost:
    torch.manual_seed(7)
    return LocalModelHost(config, term, Optimizer(FlatModel(torch.nn.Linear(4, 3)), SgdConfig(lr=LR)), blobs)


HOSTS: dict[str, Callable[[JobConfig, int, MemoryBlobs], ModelHost]] = {"local": local}


class Rig:
    def __init__(self, make: Callable[[JobConfig, int, MemoryBlobs], ModelHost]) -> None:
        self.blobs = MemoryBlobs()
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
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(HOSTS[request.param])


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
    assert (rig.blobs.get("g1"), rig.blobs.get("g2")) == (None, None)


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
    pointer = rig.blobs.get(latest_key("unit"))
    assert pointer is not None
    latest = decode_latest(pointer)
    assert (latest.term, latest.version, latest.key) == (3, 0, key)
    rig.blobs.wipe()
    assert rig.host.publish(0) == key
    assert rig.blobs.get(key) is None, "it is not written a second time"
    assert rig.host.republish(0) == key
    rig.published(key, 0)


def test_old_versions_are_deleted(rig: Rig) -> None:
    keys = [rig.host.publish(version) for version in range(4)]
    assert [rig.blobs.get(key) is not None for key in keys] == [False, False, True, True]  # blobs.keep_versions


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
