"""The step equals plain torch on the mean gradient, to the bit, and goes on from a checkpoint as if never stopped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from doll.config import AdagradConfig, AdamConfig, OptimizerConfig, SgdConfig, TrainingConfig
from doll.config.policy import OuterStep
from doll.errors import CheckpointError
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import DivergedError, Optimizer, OuterOptimizer
from doll.optim.recipe import make_optimizer

pytestmark = pytest.mark.slow  # loads torch

CONFIGS: dict[str, tuple[OptimizerConfig, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (SgdConfig(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        SgdConfig(lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "nesterov": (
        SgdConfig(lr=0.1, momentum=0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    ),
    "adam": (
        AdamConfig(name="adam", lr=0.01, beta1=0.8, beta2=0.99, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
    ),
    "adagrad": (
        AdagradConfig(lr=0.03, initial_accumulator=0.2, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.03, initial_accumulator_value=0.2, weight_decay=0.1),
    ),
    "adagrad, from 0": (AdagradConfig(lr=0.03), lambda p: torch.optim.Adagrad(p, lr=0.03)),
}


def flat_model(batch_norm: bool = False) -> FlatModel:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(3, 4), *([torch.nn.BatchNorm1d(4)] if batch_norm else []), torch.nn.Linear(4, 2)]
    return FlatModel(torch.nn.Sequential(*layers))


def sums(count: int, numel: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=numel).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("samples", [24, 32])
@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_equals_torch_on_the_mean_gradient(name: str, size: str, samples: int) -> None:
    """This holds also where scale and learning rate make one factor (1 / 32), and where the step is made in slices."""
    config, make = CONFIGS[name]
    torch.manual_seed(1)
    ours = Optimizer(flat_model() if size == "small" else FlatModel(torch.nn.Linear(301, 2003)), config)
    theirs = torch.nn.Parameter(torch.from_numpy(ours.weights.copy()))
    plain = make([theirs])
    into = [np.empty_like(ours.weights) for _ in range(2)]
    for step in range(5):
        gradients = sums(3, ours.weights.size, step)
        ours.apply(gradients, 1 / samples, samples, into[step % 2] if step < 3 else None)
        total = torch.from_numpy(gradients[0] + gradients[1] + gradients[2])
        theirs.grad = total * (1 / samples)
        plain.step()
        assert ours.weights.tobytes() == theirs.detach().numpy().tobytes()
    state = {
        f"optimizer.{key}": value.numpy().tobytes()
        for key, value in plain.state[theirs].items()
        if torch.is_tensor(value)
    }
    kept = {key: value.tobytes() for key, value in ours.tensors().items() if key != "weights"}
    assert kept == state


@pytest.mark.parametrize("momentum_of", ["steps", "gradients"])
@pytest.mark.parametrize("size", ["small", "large"])
def test_momentum_of_adagrad_is_of_its_steps(size: str, momentum_of: str) -> None:
    """And not of its gradients; through two checkpoints, whose weights are in memory that was given."""
    config = AdagradConfig(lr=0.03, initial_accumulator=0.2, momentum=0.7, weight_decay=0.1)

    def model() -> FlatModel:
        return flat_model() if size == "small" else FlatModel(torch.nn.Linear(301, 2003))

    ours = Optimizer(model(), config)
    weights = ours.weights.astype(np.float64)
    squares, buffer = np.full(weights.size, 0.2), np.zeros(weights.size)
    for step in range(6):
        if step % 2:
            tensors, ours = ours.tensors(), Optimizer(model(), config)
            ours.load(tensors)
        (gradient,) = sums(1, weights.size, step)
        ours.apply([gradient], 1 / 24, 24, np.empty_like(ours.weights) if step % 2 else None)
        mean = gradient.astype(np.float64) / 24 + 0.1 * weights
        if momentum_of == "gradients":
            mean = buffer = 0.7 * buffer + mean
        squares += mean**2
        if momentum_of == "steps":
            buffer = 0.7 * buffer + mean / np.sqrt(squares)
        weights -= 0.03 * (buffer if momentum_of == "steps" else mean / np.sqrt(squares))
    assert np.allclose(ours.weights, weights, rtol=1e-4, atol=1e-6) == (momentum_of == "steps")


def test_a_step_that_overflows_the_weights_is_no_model() -> None:
    ours = Optimizer(flat_model(), SgdConfig(lr=1e10))
    large = np.full(ours.weights.size, 1e30, np.float32)
    with pytest.raises(DivergedError, match="after the step the weights are not finite"):
        ours.apply([large], 1.0, 1)


def test_a_gradient_whose_sum_overflows_and_whose_numbers_do_not_is_applied() -> None:
    ours = Optimizer(flat_model(), SgdConfig(lr=1e-38))
    ours.apply([np.full(ours.weights.size, 3e38, np.float32)], 1.0, 1)
    assert np.isfinite(ours.weights).all()


def test_finite_gradients_whose_sum_overflows_have_a_mean() -> None:
    """Two workers may each push a finite gradient that float32 cannot add."""
    model = flat_model(batch_norm=True)
    ours, n = Optimizer(model, SgdConfig(lr=1e-38)), model.num_parameters
    before = ours.weights.copy()
    gradient = np.full(before.size, 3e38, np.float32)
    ours.apply([gradient, gradient], 1 / 16, 16)
    np.testing.assert_allclose(before[:n] - ours.weights[:n], 3e38 / 8 * 1e-38, rtol=1e-4)
    np.testing.assert_allclose(ours.weights[n : model.num_floats], 6e38 / 16, rtol=1e-5)


def test_a_gradient_longer_than_the_limit_is_scaled_down_and_no_other() -> None:
    ours, free = (Optimizer(flat_model(), SgdConfig(lr=0.5), clip_norm=limit) for limit in (2.0, None))
    before = ours.weights.copy()
    (gradient,) = sums(1, before.size, 0)
    short = gradient / np.linalg.norm(gradient)
    ours.apply([16 * short], 1 / 16, 16)
    free.apply([16 * short], 1 / 16, 16)
    assert ours.weights.tobytes() == free.weights.tobytes()
    for size in (64.0, 1e25, 3e38):
        before = ours.weights.copy()
        ours.apply([np.float32(size) * short, np.float32(size) * short], 1 / 16, 16)
        assert np.linalg.norm(ours.weights - before) == pytest.approx(0.5 * 2.0, rel=1e-4)


@pytest.mark.parametrize("name", ["adam", "adagrad"])
def test_an_optimizer_that_would_stand_still_for_good_is_none(name: str) -> None:
    """The square of a long gradient is infinite, and each later step is a number divided by it."""
    large = np.full(26, 1e25, np.float32)
    with pytest.raises(DivergedError, match=r"after the step the optimizer's state is not finite.*clip_norm"):
        Optimizer(flat_model(), CONFIGS[name][0]).apply([large], 1.0, 1)
    Optimizer(flat_model(), CONFIGS[name][0], clip_norm=10.0).apply([large], 1.0, 1)


def test_divergence_ends_the_job_and_is_not_tried_again() -> None:
    assert DivergedError.exit_code == 2


@pytest.mark.parametrize("name", CONFIGS)
def test_its_state_survives_a_checkpoint(name: str) -> None:
    config, _ = CONFIGS[name]
    one, other = Optimizer(flat_model(), config), Optimizer(flat_model(), config)
    for step in range(3):
        one.apply(sums(2, one.weights.size, step), 1 / 8, 8)
    tensors = one.tensors()
    other.load(tensors)
    for step in range(3, 6):
        for optimizer in (one, other):
            optimizer.apply(sums(2, one.weights.size, step), 1 / 8, 8)
    assert one.weights.tobytes() == other.weights.tobytes()
    # What was handed out is a copy: later steps did not change it.
    assert tensors["weights"].tobytes() != one.weights.tobytes()
    assert {key: value.tobytes() for key, value in one.tensors().items()} == {
        key: value.tobytes() for key, value in other.tensors().items()
    }


def test_the_sum_is_the_papers_literal_rule() -> None:
    ours = Optimizer(flat_model(), SgdConfig(lr=0.5))
    before = ours.weights.copy()
    gradient = np.ones(before.size, np.float32)
    ours.apply([gradient, gradient], 1.0, 64)
    np.testing.assert_array_equal(ours.weights, before - np.float32(1.0))


def test_buffers_become_their_mean_over_the_samples() -> None:
    """Whatever the scale of the parameters' step is: a worker sends value times samples."""
    model = flat_model(batch_norm=True)
    ours = Optimizer(model, SgdConfig(lr=0.1))
    before = ours.weights.copy()
    n = model.num_parameters
    gradients = []
    for samples, mean in ((8, 1.0), (24, 2.0)):
        gradient = np.zeros(before.size, np.float32)
        gradient[n : model.num_floats] = mean * samples
        gradient[model.num_floats :].view(np.int64)[:] = samples
        gradients.append(gradient)
    ours.apply(gradients, 1.0, 32)
    np.testing.assert_array_equal(ours.weights[:n], before[:n])
    np.testing.assert_allclose(ours.weights[n : model.num_floats], 1.75)
    assert model.module[1].num_batches_tracked == 24, "what is no float is taken over from the last batch"  # type: ignore[index]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_makes_no_model(name: str, value: float, clip_norm: float | None) -> None:
    ours = Optimizer(flat_model(), CONFIGS[name][0], clip_norm)
    ours.apply(sums(1, ours.weights.size, 0), 1.0, 8)
    bad = sums(1, ours.weights.size, 1)[0]
    bad[3] = value
    with pytest.raises(DivergedError, match=r"the gradient is not finite.*lower training\.optimizer\.lr"):
        ours.apply([sums(1, ours.weights.size, 2)[0], bad], 1.0, 16)


def test_the_norm_of_a_long_vector_is_that_of_its_slices() -> None:
    model = FlatModel(torch.nn.Linear(301, 2003))
    ours = Optimizer(model, SgdConfig(lr=1.0), clip_norm=3.0)
    before = ours.weights.copy()
    ours.apply([np.random.default_rng(0).normal(size=before.size).astype(np.float32)], 1.0, 1)
    assert np.linalg.norm((ours.weights - before).astype(np.float64)) == pytest.approx(3.0, rel=1e-5)


def test_an_update_of_refused_records_only_changes_nothing() -> None:
    ours = Optimizer(flat_model(), CONFIGS["momentum"][0])
    ours.apply(sums(1, ours.weights.size, 0), 1.0, 8)
    before = {key: tensor.tobytes() for key, tensor in ours.tensors().items()}
    ours.apply([], 1.0, 0)
    assert {key: tensor.tobytes() for key, tensor in ours.tensors().items()} == before


def test_read_only_gradients_are_taken_as_they_come_from_redis() -> None:
    ours = Optimizer(flat_model(), SgdConfig(lr=0.1))
    gradient = sums(1, ours.weights.size, 0)[0]
    before = ours.weights.copy()
    ours.apply([np.frombuffer(gradient.tobytes(), "<f4")], 1.0, 1)
    np.testing.assert_allclose(ours.weights, before - np.float32(0.1) * gradient, atol=1e-7)


@pytest.mark.parametrize(
    ("tensors", "came"), [({}, "nothing"), ({"weights": np.zeros(3, np.float32)}, r"\(3,\)")], ids=["none", "size"]
)
def test_weights_that_do_not_fit_are_refused(tensors: dict[str, np.ndarray], came: str) -> None:
    with pytest.raises(CheckpointError, match=rf"expected weights of shape \(26,\), got {came}"):
        Optimizer(flat_model(), SgdConfig()).load(tensors)


def test_a_server_does_not_import_torchs_compiler() -> None:
    """The import costs seconds at each start, also at a restart after a crash, when all workers wait."""
    code = """
import sys, numpy as np, torch
from doll.config import AdagradConfig, AdamConfig, SchedulePart, SgdConfig
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import Optimizer
schedule = [SchedulePart(cls="torch.optim.lr_scheduler.StepLR", args={"step_size": 2})]
for config in (SgdConfig(momentum=0.9), AdamConfig(name="adam"), AdagradConfig()):
    for given in ([], schedule):
        ours = Optimizer(FlatModel(torch.nn.Linear(2, 1)), config, schedule=given)
        ours.apply([np.ones(3, np.float32)], 1.0, 1)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("name", [*CONFIGS, "adamw", "outer"])
def test_a_parameter_without_a_gradient_stays_as_torch_leaves_it(name: str) -> None:
    """Some parameters have none for some updates, one has none at first, and once none has any; over a restart."""

    def module() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5), torch.nn.Linear(5, 2, bias=False))

    config, make = CONFIGS.get(name, (SgdConfig(), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)))

    def made() -> Optimizer:
        if name == "outer":
            return OuterOptimizer(FlatModel(module()), OuterStep(0.7, 0.9, 0.5))
        if name == "adamw":
            args = {"class": "torch.optim.AdamW", "args": {"lr": 0.01, "weight_decay": 0.1}}
            return make_optimizer(TrainingConfig.model_validate({"optimizer": args}), FlatModel(module()))
        return Optimizer(FlatModel(module()), config)

    ours, theirs = made(), list(module().parameters())
    plain = torch.optim.SGD(theirs, lr=0.7, momentum=0.9, nesterov=True) if name == "outer" else make(theirs)
    into = np.empty_like(ours.weights)
    for step, absent in enumerate((0b10010, 0b00011, 0, 0b01100, 0b11111, 0, 0b10000, 0b00001)):
        if step == 5:
            tensors, ours = ours.tensors(), made()
            ours.load(tensors)
        (total,) = sums(1, ours.weights.size, step)
        at = 0
        for place, parameter in enumerate(theirs):
            part = total[at : (at := at + parameter.numel())]
            part[:] = 0 if absent >> place & 1 else part
            parameter.grad = None if absent >> place & 1 else torch.from_numpy(part / 8).view_as(parameter)
        ours.apply([total], 1 / 8, 8, into if step % 2 else None, absent=absent)
        plain.step()
        expected = np.concatenate([parameter.detach().numpy().ravel() for parameter in theirs])
        assert ours.weights.tobytes() == expected.tobytes(), step
