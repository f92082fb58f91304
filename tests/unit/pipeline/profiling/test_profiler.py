"""Profiles of real models: what is counted, and the clock that it is told."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from doll.errors import ConfigError
from doll.pipeline.links.device import as_received
from doll.pipeline.profiling.layers import layers_of
from doll.pipeline.profiling.profiler import profile_layers, sample_batch
from doll.task.base import Sample, Task
from torch import nn

pytestmark = pytest.mark.slow  # loads torch


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
    assert linear == 0  # its input is counted where it is made, and nobody needs its output
    assert relu == 16 * 20 * 4  # its output, once, though the next layer keeps it too
    assert norm == 16 * 20 * 4 + 2 * 20 * 4  # its output, and the statistics of the batch
    assert last >= 16 * 3 * 4
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

    with pytest.raises(ConfigError, match=r"expected held-out samples.* the task has neither"):
        sample_batch(Shapeless(), model, 3, RNG)
    tuples = nn.Sequential(nn.LSTM(10, 4), nn.Linear(4, 3))
    with pytest.raises(
        ConfigError, match=r"expected held-out samples.* fails on samples of shape \(2, 10\): TypeError: "
    ):
        sample_batch(Net(), tuples, 3, RNG)


def test_a_device_that_is_not_there_and_a_layer_that_fails_are_refused() -> None:
    task = Net()
    model = task.build_model()
    batch = sample_batch(task, model, 4, RNG)
    layers = layers_of(task, model)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="cuda:3: expected cpu, or one of the 0 CUDA devices"):
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
    assert [layer.activation_bytes for layer in profile.layers[:3]] == [0, 16 * 20 * 4, 0]  # input and output are one


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.second(torch.tanh(self.first(x))))


class Views(Task):
    """Layers whose outputs are kept by both neighbours, by one, by none, and are views or in place."""

    input_shape = (1, 8, 8)
    num_classes = 3

    def decode(self, record: bytes) -> Sample:
        raise NotImplementedError

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Identity(), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), Block(), nn.ReLU(inplace=True),
            nn.MaxPool2d(2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 20), nn.GELU(), nn.Unflatten(1, (4, 5)),
            nn.LayerNorm(5), nn.Flatten(), nn.Identity(), nn.Tanh(), nn.Linear(20, 3),
        )  # fmt: skip


@pytest.mark.parametrize("task", [Net(), Held(), InPlace(), Views()], ids=lambda task: type(task).__name__)
def test_layers_that_follow_each_other_keep_what_they_are_profiled_with(task: Task) -> None:
    model = task.build_model()
    layers = layers_of(task, model)
    batch = sample_batch(task, model, 16, RNG)
    profile = profile_layers(task, layers, batch, model="net", repeats=1)
    x = torch.from_numpy(batch.x)
    for first in range(len(layers)):
        for stop in range(first + 1, len(layers)):
            part = nn.Sequential(*(layer.module for layer in layers[first:stop]))
            taken = x.detach().clone().requires_grad_(first > 0)
            own = {tensor.untyped_storage().data_ptr() for tensor in (*part.parameters(), *part.buffers(), taken)}
            kept: dict[int, torch.UntypedStorage] = {}

            def pack(
                tensor: torch.Tensor, own: set[int] = own, kept: dict[int, torch.UntypedStorage] = kept
            ) -> torch.Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    kept[storage.data_ptr()] = storage
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                output = part(as_received(taken) if first else taken)
            measured = sum(storage.nbytes() for storage in kept.values())
            size = profile.size_of(first, stop)
            # The output of the last layer may be counted for the layer behind it, which keeps it.
            last = output.untyped_storage().nbytes() if output.untyped_storage().data_ptr() not in kept else 0
            assert measured <= size.activation_bytes <= measured + last, (first, stop)
        with torch.no_grad():
            x = layers[first].module(x.clone())


@pytest.mark.parametrize("device", ["cuda", "gpu", "cuda:x", "cpu:0"])
def test_an_unknown_device_is_refused(device: str) -> None:
    task = Net()
    model = task.build_model()
    with pytest.raises(ConfigError, match="expected cpu or cuda:N"):
        profile_layers(task, layers_of(task, model), sample_batch(task, model, 4, RNG), model="net", device=device)
