"""The parts of `benchmarks.large_models`, which must follow the ports that they stand in for."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from benchmarks.large_models import JOB, CountingBlobs, Replica
from doll.config import parse
from doll.consumers.compute.gradient import CachedVersion
from doll.model.flat_model import build
from doll.ps.engine.events import FetchGradient, GradientFetched
from doll.ps.model.model_host import ModelHost
from doll.ps.model.updater import make_parts
from doll.storage.blobs import Blobs, gradient_key, weights_key
from doll.storage.contributions import Compressor
from doll.task.base import load_task
from record_builders import grant_of

from doll_lab.simulation.memory_blobs import MemoryBlobs

pytestmark = pytest.mark.slow


def test_its_store_has_all_of_the_port() -> None:
    port = [name for name, _ in inspect.getmembers(Blobs) if not name.startswith("_")]
    assert [name for name in port if not hasattr(CountingBlobs, name)] == []


def test_weights_and_gradients_pass_through_its_parts() -> None:
    config = parse(JOB % ([], 0.0, 10))
    model = build(config, load_task(config))
    blobs, numel = CountingBlobs(MemoryBlobs()), model.flat.numel()
    host = ModelHost(config, 1, make_parts(config.training, model).updater, blobs)
    assert host.publish(0) == weights_key(config.job, 1, 0)
    replica = Replica(numel)
    grant = grant_of(0, 0, (1,), key=weights_key(config.job, 1, 0))
    assert CachedVersion(config.job, blobs, replica).load(grant) == 0  # type: ignore[arg-type]
    assert (replica.weights == model.flat.numpy()).all()
    key = gradient_key(config.job, 1, 1)
    assert blobs.put_soon(key, Compressor(config.job).compress(np.ones(numel, np.float32), version=0), 60.0)
    blobs.settle()
    host.prefetch([key], coming=[key])
    assert host.fetch(FetchGradient(1, key, 0)).event == GradientFetched(grant_id=1, max_change=0.0)
    assert not blobs.is_far
    assert blobs.moved_bytes >= 16 * numel, "each value was written and read twice"
