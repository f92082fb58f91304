"""Profiles of real models: what is counted, and the clock that it is told."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from doll.errors import ConfigError
from doll.pipeline.layers import layers_of
from doll.pipeline.profiler import profile_layers, sample_batch
from doll.task import Sample, Task
from torch import nn


class Net(Task):
    input_shape = (10,)
    num_classes = 3

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 20), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(20)), nn.Linear(20, 3))

    def decode(self, record: bytes) -> Sample:
        raise NotImplementedError


class Held(Net):
    def holdout(self) -> Iterator[Sample]:
        yield Sample(np.arange(10.0), 1)
        yield Sample(np.zeros(10), 2)


class Ids(Net):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(40, 3))

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)


RNG = np.random.default_rng(0)


def test_memory_of_each_layer_is_counted() -> None:
    task = Net()
    model = task.build_model()
    batch = sample_batch(task, model, 16, RNG)
    profile = profile_layers(task, layers_of(task, model), batch, model="net")
    assert [layer.name for layer in profile.layers] == ["0", "1.0", "1.1", "2"]
    assert profile.batch_size == 16
    assert profile.input_bytes == 16 * 10 * 4
    assert [layer.parameter_bytes for layer in profile.layers] == [4 * 220, 0, 4 * 80 + 8, 4 * 63]
    assert [layer.output_bytes for layer in profile.layers] == [16 * 20 * 4, 16 * 20 * 4, 16 * 20 * 4, 0]
    linear, relu, norm, last = (layer.activation_bytes for layer in profile.layers)
    assert linear == 16 * 10 * 4  # its input alone
    assert relu == 2 * 16 * 20 * 4  # its input, and its output for the backward pass
    assert norm >= 16 * 20 * 4
    assert last >= 16 * 20 * 4
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in profile.layers)


def test_times_are_medians_of_the_given_clock_without_the_first_runs() -> None:
    ticks = iter(range(10_000))
    task = Held()
    model = task.build_model()
    layers = layers_of(task, model)[:1]
    done: list[int] = []
    profile = profile_layers(
        task, layers, sample_batch(task, model, 4, RNG), model="net", repeats=3, clock=lambda: float(next(ticks)),
        progress=done.append,
    )  # fmt: skip
    assert (profile.layers[0].forward_s, profile.layers[0].backward_s) == (1.0, 1.0)
    assert done == [1]
    assert next(ticks) == 5 * 4  # two runs that do not count, and three


def test_samples_are_held_out_ones_or_of_the_shape_that_the_model_takes() -> None:
    model = Held().build_model()
    assert sample_batch(Held(), model, 3, RNG).y.tolist() == [1, 2, 1]
    assert sample_batch(Net(), model, 3, RNG).x.dtype == np.float32
    ids = sample_batch(Ids(), Ids().build_model(), 3, RNG)
    assert ids.x.dtype == np.int64

    class Shapeless(Net):
        input_shape = None  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="expected held-out samples"):
        sample_batch(Shapeless(), model, 3, RNG)


def test_a_device_that_is_not_there_and_a_layer_that_fails_are_refused() -> None:
    task = Net()
    model = task.build_model()
    batch = sample_batch(task, model, 4, RNG)
    layers = layers_of(task, model)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="cuda:3: expected one of 0 CUDA devices"):
            profile_layers(task, layers, batch, model="net", device="cuda:3")
    with pytest.raises(ConfigError, match=r"layer '2' fails on a batch of 4 samples: RuntimeError"):
        profile_layers(task, [layers[0], layers[3]._replace(module=nn.Linear(7, 3))], batch, model="net")


class InPlace(Net):
    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.ReLU(inplace=True), nn.Linear(10, 20), nn.ReLU(inplace=True), nn.Linear(20, 3), nn.Hardtanh(inplace=True)
        )


def test_layers_that_change_their_input_are_measured_on_the_same_samples() -> None:
    task = InPlace()
    model = task.build_model()
    batch = sample_batch(task, model, 16, RNG)
    before = batch.x.copy()
    profile = profile_layers(task, layers_of(task, model), batch, model="net", repeats=1)
    assert (before < 0).any()
    np.testing.assert_array_equal(batch.x, before)
    assert profile.layers[2].activation_bytes == 16 * 20 * 4  # input and output are one


@pytest.mark.parametrize("device", ["cuda", "gpu", "cuda:x", "cpu:0"])
def test_an_unknown_device_is_refused(device: str) -> None:
    task = Net()
    model = task.build_model()
    with pytest.raises(ConfigError, match="expected cpu or cuda:N"):
        profile_layers(task, layers_of(task, model), sample_batch(task, model, 4, RNG), model="net", device=device)
