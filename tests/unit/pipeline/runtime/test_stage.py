"""Stages in one process: together they compute what the undivided model computes, and step as one worker steps."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from doll.config import TrainingConfig
from doll.consumers.compute.gradient import Gradient, GradientComputer
from doll.consumers.compute.step_model import StepModel
from doll.errors import ConfigError
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import DivergedError
from doll.pipeline.links.device import StageDevice
from doll.pipeline.runtime.messages import Commit
from doll.pipeline.runtime.stage import Stage, StageGradient
from doll.pipeline.runtime.vectors import VectorFile
from doll.records.control import Grant, NewVersion
from doll.storage.blobs import encode_blob
from doll.task.base import Task
from memory_stores import MemoryBlobs
from stage_models import Images, Net, samples
from worker_records import grant

pytestmark = pytest.mark.slow  # loads torch

Array = npt.NDArray[Any]
SGD: dict[str, Any] = {"optimizer": {"name": "sgd", "lr": 0.1}}
CUTS = {
    "one stage": (Net, [8]),
    "two": (Net, [3, 8]),
    "a stage without parameters": (Net, [1, 4, 5, 8]),
    "each layer": (Net, [1, 2, 3, 4, 5, 6, 7, 8]),
    "images": (Images, [2, 4, 6]),
}


class Chain:
    """Stages of a model, driven by hand; `shared` is what they store."""

    def __init__(
        self, task: Task, stops: Sequence[int], slots: int = 2, *, is_limited: bool = False, **training: Any
    ) -> None:
        torch.manual_seed(0)
        self.task, self.training = task, TrainingConfig.model_validate(training or SGD)
        whole = FlatModel(task.build_model())
        self.first_weights = whole.flat.detach().numpy().copy()
        self.num_parameters, self.num_floats = whole.num_parameters, whole.num_floats
        layers = list(whole.module.children())
        starts = [0, *stops[:-1]]
        self.stages = [
            Stage(
                task, whole, layers[start:stop], training=self.training, slots=slots, is_first=start == 0,
                is_last=stop == len(layers), device=StageDevice(), is_limited=is_limited,
            )
            for start, stop in zip(starts, stops, strict=True)
        ]  # fmt: skip
        self.results: dict[int, StageGradient] = {}  # of the last stage, by slot
        self.file = VectorFile(len(self.first_weights))
        self.shared = self.file.mapped()

    def adopt(self, weights: Array, included: int = 0) -> None:
        self.shared[:] = weights
        for stage in self.stages:
            stage.adopt(self.file, included)
        self.shared[:] = 0.0

    def weights(self) -> Array:
        for stage in self.stages:
            stage.show(self.file)
        return self.shared.copy()

    def forward(self, slot: int, x: Array, y: Array) -> Any:
        h = x
        for stage in self.stages:
            h = stage.device.get(stage.forward(slot, h, len(x)))
        loss = self.stages[-1].loss(slot, y)
        self.results[slot] = self.stages[-1].backward(slot)
        return loss

    def backward(self, slot: int) -> tuple[float, float]:
        """Norm of the gradient, and of the change of the buffers."""
        result = self.results.pop(slot)
        squares, changes = result.squares, result.buffer_squares
        for stage in reversed(self.stages[:-1]):
            result = stage.backward(
                slot, [None if part is None else stage.device.get(part) for part in result.of_input]
            )
            squares, changes = squares + result.squares, changes + result.buffer_squares
        return squares**0.5, changes**0.5

    def gradient(self, slot: int) -> Array:
        """What is in the slots."""
        values = np.zeros_like(self.first_weights)
        for stage in self.stages:
            waiting = torch.zeros(len(stage.weights))
            stage._vectors.read(slot, 0, waiting)
            for part in stage.ranges:
                values[part.there : part.there + part.length] = waiting[part.here : part.here + part.length]
        return values

    def commit(self, batch: int, slot: int, *, scale: float, n: int, ends_wave: bool = False) -> None:
        for stage in self.stages:
            stage.commit(Commit(batch=batch, slot=slot, scale=scale, weight=float(n), ends_wave=ends_wave))

    def store(self, until: int) -> Array:
        for stage in self.stages:
            stage.store(until, self.file)
        return self.shared.copy()


class Undivided:
    """A worker without stages, and the weights that it is given."""

    def __init__(self, chain: Chain) -> None:
        torch.manual_seed(0)
        model = FlatModel(chain.task.build_model())
        self.blobs = MemoryBlobs()
        self.computer = GradientComputer(chain.task, model)
        self.steps = StepModel("unit", self.blobs, chain.training, model, self.computer)

    def load(self, weights: Array, *, version: int, first: int, included: int = 0) -> None:
        key = f"w{version}"
        self.blobs.put(key, encode_blob(weights, job="unit", kind="w", version=version), 60.0)
        order: Grant = grant(first, version=version, min_version=version, key=key, included=included)
        self.steps.offer(NewVersion(term=3, worker=1, version=version, key=key, included=included))
        assert self.steps.begin(order)
        assert self.steps.load(order) == version

    def learn(self, batch: int, x: Array, y: Array) -> Gradient:
        gradient = self.computer.compute(x, y)
        gradient = gradient._replace(vector=gradient.vector.clone())
        self.steps.add(gradient, batch=batch)
        return gradient


def assert_same(actual: Array, expected: Array, chain: Chain) -> None:
    """Numbers are close, and the bytes of integers are the same."""
    floats = chain.num_floats
    scale = max(1.0, float(np.abs(expected[:floats]).max(initial=0.0)))
    np.testing.assert_allclose(actual[:floats], expected[:floats], rtol=0, atol=1e-6 * scale)
    assert actual[floats:].tobytes() == expected[floats:].tobytes()


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("name", CUTS)
def test_the_gradient_is_that_of_the_undivided_model(name: str, n: int) -> None:
    kind, stops = CUTS[name]
    chain = Chain(kind(), stops)
    computer = Undivided(chain).computer
    weights = chain.first_weights
    weights[: chain.num_floats] += np.random.default_rng(0).normal(0, 0.1, chain.num_floats) ** 2
    chain.adopt(weights)
    computer.load(weights)
    x, y = samples(chain.task, 0, n)
    expected = computer.compute(x, y)
    loss = chain.forward(0, x, y)
    norm, change = chain.backward(0)
    assert_same(chain.gradient(0), expected.values, chain)
    assert loss.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)
    assert loss.metric_sums == pytest.approx(expected.metric_sums)
    assert norm == pytest.approx(expected.norm, rel=1e-4)
    assert change == pytest.approx(expected.buffer_change, rel=1e-4, abs=1e-7)
    assert_same(chain.weights(), weights, chain)


def test_each_number_of_the_model_is_at_one_stage() -> None:
    for kind, stops in CUTS.values():
        chain = Chain(kind(), stops)
        held = sorted(
            at for stage in chain.stages for part in stage.ranges for at in range(part.there, part.there + part.length)
        )
        assert len(held) == len(set(held))
        assert set(range(chain.num_floats)) <= set(held)


def test_frozen_parameters_are_there_once() -> None:
    chain = Chain(Net(), [2, 7, 8], 3)
    middle = chain.stages[1]
    for slot in range(3):
        chain.forward(slot, *samples(chain.task, slot, 4))
    modules = [item.replica.module for item in middle._in_flight.values()] + [middle._local.module]
    frozen = {p.data_ptr() for module in modules for p in module.parameters() if not p.requires_grad}
    trainable = {p.data_ptr() for module in modules for p in module.parameters() if p.requires_grad}
    assert len(frozen) == 2
    assert len(trainable) == 4 * 2


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": SGD,
    "sum": {**SGD, "reduction": "sum"},
    "momentum": {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "decay": {"optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.1}},
    "adam": {"optimizer": {"name": "adam", "lr": 0.01}},
    "adagrad": {"optimizer": {"name": "adagrad", "lr": 0.05}},
    "clip": {**SGD, "clip_norm": 0.3},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("in_flight", "is_limited"), [(1, False), (3, False), (1, True), (3, True)])
def test_the_sum_of_a_waves_steps_is_that_of_an_undivided_worker(name: str, in_flight: int, is_limited: bool) -> None:
    """Minibatch p is computed on the steps up to p - N_m; the undivided worker computes it on the same numbers."""
    chain = Chain(Net(), [2, 5, 8], in_flight, is_limited=is_limited, **OPTIMIZERS[name])
    undivided = Undivided(chain)
    wave = 3
    chain.adopt(chain.first_weights)
    undivided.load(chain.first_weights, version=1, first=0)
    flying: deque[tuple[int, Gradient]] = deque()  # what the undivided worker has computed
    total = 3 * wave
    for number in range(total + in_flight):
        if len(flying) == in_flight or (flying and number >= total):
            batch, gradient = flying.popleft()
            n = len(samples(chain.task, batch, 4 + batch % 3)[0])
            norm, _ = chain.backward(batch % in_flight)
            assert norm == pytest.approx(gradient.norm, rel=1e-4)
            scale = 1.0 if chain.training.reduction == "sum" else 1.0 / n
            if (limit := chain.training.clip_norm) is not None and scale * norm > limit:
                scale = limit / norm
            ends = (batch + 1) % wave == 0
            chain.commit(batch, batch % in_flight, scale=scale, n=n, ends_wave=ends)
            undivided.steps.add(gradient, batch=batch)
            assert_same(chain.weights()[: chain.num_parameters], undivided_view(undivided, chain), chain)
            if ends:
                expected = undivided.steps.values()
                assert expected is not None
                assert_same(chain.store(batch + 1), expected, chain)
        if number < total:
            x, y = samples(chain.task, number, 4 + number % 3)
            chain.forward(number % in_flight, x, y)
            gradient = undivided.computer.compute(x, y)
            flying.append((number, gradient._replace(vector=gradient.vector.clone())))


def undivided_view(undivided: Undivided, chain: Chain) -> Array:
    return undivided.computer.weights[: chain.num_parameters]


@pytest.mark.parametrize("is_limited", [False, True])
def test_the_backward_pass_uses_the_weights_of_the_forward_pass(is_limited: bool) -> None:
    """Other weights have been adopted and stepped on in between (the stash)."""
    chain = Chain(Net(), [2, 5, 8], 2, is_limited=is_limited)
    computer = Undivided(chain).computer
    weights = chain.first_weights
    chain.adopt(weights)
    computer.load(weights)
    first, second = samples(chain.task, 0, 8), samples(chain.task, 1, 8)
    expected = [computer.compute(*first).values.copy(), computer.compute(*second).values.copy()]
    chain.forward(0, *first)
    chain.forward(1, *second)
    chain.backward(0)
    assert_same(chain.gradient(0), expected[0], chain)
    chain.commit(0, 0, scale=0.1, n=8)
    chain.adopt(weights * 2)
    chain.backward(1)
    assert_same(chain.gradient(1), expected[1], chain)


def learn(chain: Chain, batch: int, *, ends_wave: bool = False, scale: float = 0.1) -> None:
    x, y = samples(chain.task, batch, 8)
    chain.forward(0, x, y)
    chain.backward(0)
    chain.commit(batch, 0, scale=scale, n=8, ends_wave=ends_wave)


@pytest.mark.parametrize("is_limited", [False, True])
@pytest.mark.parametrize("included", [0, 2, 4])
def test_weights_that_are_adopted_get_the_own_steps_that_they_lack(included: int, is_limited: bool) -> None:
    chain = Chain(Net(), [2, 5, 8], is_limited=is_limited)
    chain.adopt(chain.first_weights)
    for batch in range(5):
        learn(chain, batch, ends_wave=batch % 2 == 1)
    waves = {until: chain.store(until) for until in (2, 4)}
    n = chain.num_parameters
    under_way = chain.weights()[:n] - chain.first_weights[:n] - waves[2][:n] - waves[4][:n]
    newer = chain.first_weights * 3
    chain.adopt(newer, included)
    expected = newer[:n] + under_way + sum(steps[:n] for until, steps in waves.items() if until > included)
    np.testing.assert_allclose(chain.weights()[:n], expected, atol=1e-6)
    assert chain.weights()[n:].tobytes() == newer[n:].tobytes(), "statistics are the version's"


@pytest.mark.parametrize("is_limited", [False, True])
def test_steps_that_are_void_are_forgotten(is_limited: bool) -> None:
    chain = Chain(Net(), [2, 5, 8], is_limited=is_limited)
    chain.adopt(chain.first_weights)
    for batch in range(5):
        learn(chain, batch, ends_wave=batch % 2 == 1)
    kept = chain.store(2)
    for stage in chain.stages:
        stage.forget(2)
    chain.adopt(chain.first_weights)
    n = chain.num_parameters
    np.testing.assert_allclose(chain.weights()[:n], chain.first_weights[:n] + kept[:n], atol=1e-6)
    assert not chain.store(4).any()
    learn(chain, 2)
    learn(chain, 3, ends_wave=True)
    assert chain.store(4).any()


@pytest.mark.parametrize("is_limited", [False, True])
def test_what_is_dropped_changes_nothing(is_limited: bool) -> None:
    chain = Chain(Net(), [2, 5, 8], is_limited=is_limited)
    chain.adopt(chain.first_weights)
    learn(chain, 0, scale=0.0)
    chain.forward(0, *samples(chain.task, 1, 8))
    for stage in chain.stages:
        stage.drop(0)
    chain.commit(1, 0, scale=0.0, n=0, ends_wave=True)
    assert chain.weights().tobytes() == chain.first_weights.tobytes()
    assert not chain.store(2).any()


def test_a_wave_closed_early_holds_what_was_before() -> None:
    chain = Chain(Net(), [2, 5, 8])
    chain.adopt(chain.first_weights)
    learn(chain, 0)
    for stage in chain.stages:
        stage.commit(Commit(batch=0, slot=-1, scale=0.0, weight=0.0, ends_wave=True))
    n = chain.num_parameters
    step = chain.weights()[:n] - chain.first_weights[:n]
    learn(chain, 1)
    np.testing.assert_allclose(chain.store(1)[:n], step, atol=1e-7)


def test_weights_that_are_not_finite_are_not_kept_quiet() -> None:
    chain = Chain(Net(), [2, 5, 8])
    chain.adopt(chain.first_weights)
    with pytest.raises(DivergedError):
        learn(chain, 0, scale=float("nan"))


def test_limited_and_other_stages_compute_the_same_bits() -> None:
    chains = [Chain(Images(), [2, 4, 6], 1, is_limited=each, **OPTIMIZERS["adam"]) for each in (False, True)]
    for chain in chains:
        chain.adopt(chain.first_weights)
        for batch in range(5):
            learn(chain, batch, ends_wave=batch % 2 == 1)
    one, other = ([chain.store(2), chain.store(4), chain.weights()] for chain in chains)
    for expected, actual in zip(one, other, strict=True):
        assert actual.tobytes() == expected.tobytes()


def test_a_minibatch_takes_a_copy_of_the_weights_between_its_passes_only() -> None:
    """The paper's rule: as many copies as minibatches between forward and backward pass; the last stage has the weights
    alone, and so has each with one minibatch in flight."""
    chain = Chain(Net(), [3, 8], 3)
    for slot in range(3):
        chain.forward(slot, *samples(chain.task, slot, 8))
    first, last = chain.stages
    held = {item.replica.flat.data_ptr() for item in first._in_flight.values()}
    assert len(held - {first.weights.data_ptr()}) == 3
    assert (last._in_flight, last._replicas) == ({}, [last._local])
    assert [stage._replicas for stage in Chain(Net(), [3, 8], 1).stages[:1]] != [[]]


def test_a_copy_of_the_weights_that_is_made_takes_no_memory_but_its_own() -> None:
    stage = Chain(Images(), [2, 4, 6]).stages[0]
    models = [stage._local, stage._take_replica()]
    assert models[0].flat.data_ptr() != models[1].flat.data_ptr()
    for model in models:
        tensors = [*model.module.parameters(), *model.module.buffers()]
        assert {each.untyped_storage().data_ptr() for each in tensors} == {model.flat.untyped_storage().data_ptr()}


class Tied(Net):
    def build_model(self) -> torch.nn.Module:
        first, second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        second.weight = first.weight
        return torch.nn.Sequential(first, torch.nn.ReLU(), second, torch.nn.Linear(6, 2))


def test_a_parameter_that_two_stages_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="shared"):
        Chain(Tied(), [1, 4])


OUTPUTS: list[weakref.ref[torch.Tensor]] = []


class Watched(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        OUTPUTS.append(weakref.ref(output))
        return output


class WatchedNet(Net):
    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(Watched(12, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))


def test_an_output_that_was_sent_takes_no_memory_until_the_backward_pass() -> None:
    OUTPUTS.clear()
    task = WatchedNet()
    stage = Chain(task, [1, 3]).stages[0]
    x = np.ones((5, 12), np.float32)
    sent = stage.forward(0, x, len(x))
    assert sent.shape == (5, 6)
    assert [output() for output in OUTPUTS] == [None]  # `sent` is another tensor, with its memory
    assert stage.backward(0, [np.ones((5, 6), np.float32)]).squares == pytest.approx(12 * 6 * 25 + 6 * 25)


class Part(torch.nn.Module):
    """With a parameter that is used now and then, and random numbers."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.layer, self.shift = torch.nn.Linear(6, out), torch.nn.Parameter(torch.ones(out))
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        output: torch.Tensor = self.dropout(y * self.shift if x.shape[0] > 4 else y)
        return output


class Parts(Net):
    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(Part(6), Part(3))


def test_a_parameter_that_a_minibatch_has_not_used_is_not_decayed_at_its_stage() -> None:
    chain = Chain(Parts(), [1, 2], optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.5})
    chain.adopt(chain.first_weights)
    shifts = [
        parameter
        for stage in chain.stages
        for name, parameter in stage._local.module.named_parameters()
        if "shift" in name
    ]
    for batch, (n, moves) in enumerate(((2, False), (8, True), (3, False))):
        before = [shift.clone() for shift in shifts]
        chain.forward(batch % 2, *data(n))
        chain.backward(batch % 2)
        chain.commit(batch, batch % 2, scale=1 / n, n=n)
        assert [not torch.equal(a, b) for a, b in zip(before, shifts, strict=True)] == [moves, moves]


def test_a_stage_draws_the_numbers_of_a_minibatch() -> None:
    (stage,) = Chain(Parts(), [2]).stages
    x, _ = data(8)
    outputs = [np.asarray(stage.device.get(stage.forward(0, x, 8, seed=seed))).tobytes() for seed in (1, 2, 1)]
    assert outputs[0] == outputs[2] != outputs[1]


def data(n: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(n)
    return rng.normal(size=(n, 6)).astype(np.float32), rng.integers(0, 3, n)
