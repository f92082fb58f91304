"""Versions in memory: two copies of a model, and nobody ever computes with one that is being loaded."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from doll.config import load
from doll.evaluation.stored_weights import StoredWeights
from doll.model.flat_model import FlatModel, build
from doll.serving.model_copies import Lane, ModelCopies
from doll.task.base import load_task
from serving_rig import JOB, TASK

pytestmark = pytest.mark.slow  # loads torch


def stored(version: int, numel: int = 3) -> StoredWeights:
    return StoredWeights(version, np.full(numel, version, np.float32), 1, "", {}, {})


@pytest.fixture
def copies(tmp_path: Path) -> ModelCopies:
    (tmp_path / "line.py").write_text(TASK)
    (tmp_path / "job.yaml").write_text(JOB)
    config = load(tmp_path / "job.yaml")
    return ModelCopies(lambda: build(config, load_task(config)), [Lane("latest")])


def test_two_copies_are_enough(copies: ModelCopies) -> None:
    (lane,) = copies.lanes
    for version in range(1, 20):
        copies.load(lane, stored(version))
        copy = copies.take(lane)
        assert copy.version.place.version == version
        assert set(copy.model.flat.tolist()) == {version}
        copies.give_back(copy)
    assert len(copies._copies) == 2
    assert all(copy.model.grad.numel() == 0 for copy in copies._copies)


def test_a_copy_that_is_used_is_not_loaded_before_it_is_free(copies: ModelCopies) -> None:
    (lane,) = copies.lanes
    copies.load(lane, stored(1))
    copy = copies.take(lane)
    copies.load(lane, stored(2))
    thread = threading.Thread(target=copies.load, args=(lane, stored(3)))
    thread.start()
    newer = copies.take(lane)  # requests go on meanwhile
    assert set(newer.model.flat.tolist()) == {2}
    copies.give_back(newer)
    assert set(copy.model.flat.tolist()) == {1}
    assert thread.is_alive()
    copies.give_back(copy)
    thread.join(60)
    assert set(copies.take(lane).model.flat.tolist()) == {3}


def test_lanes_with_one_version_share_its_copy(tmp_path: Path, copies: ModelCopies) -> None:
    first, second = Lane("latest"), Lane("stable")
    shared = ModelCopies(copies._build, [first, second])
    shared.load(first, stored(1))
    shared.load(second, stored(1))
    assert first.copy is second.copy
    for version in range(2, 10):
        shared.load(first, stored(version))
        copy = shared.take(second)
        assert set(copy.model.flat.tolist()) == {1}
        shared.give_back(copy)
    assert len(shared._copies) == 3


def test_what_does_not_fit_or_does_not_compute_is_not_served(copies: ModelCopies) -> None:
    (lane,) = copies.lanes
    with pytest.raises(LookupError):
        copies.take(lane)
    copies.load(lane, stored(1))
    with pytest.raises(ValueError, match="expected weights of shape"):
        copies.load(lane, stored(2, numel=7))

    def refuse(copy: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        copies.load(lane, stored(3), refuse)
    copy = copies.take(lane)
    assert copy.version.place.version == 1
    assert set(copy.model.flat.tolist()) == {1}


def test_frozen_parameters_are_in_memory_once() -> None:
    def made() -> FlatModel:
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        for parameter in module[0].parameters():
            parameter.requires_grad_(False)
        return FlatModel(module)

    lane = Lane("latest")
    copies = ModelCopies(made, [lane])
    for version in (1, 2):
        copies.load(lane, stored(version, numel=5))
    first, second = (dict(copy.model.module.named_parameters()) for copy in copies._copies)
    assert first["0.weight"].data_ptr() == second["0.weight"].data_ptr()
    assert first["1.weight"].data_ptr() != second["1.weight"].data_ptr()
