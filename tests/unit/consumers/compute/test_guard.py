"""One bad sample does not break the model, nor the worker, and only it is refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from doll.config import parse
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.compute.guard import Guard, GuardedGradient
from doll.errors import TaskError
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import Optimizer
from doll.task.base import Sample, Task
from doll.task.batches import SampleBatch
from fuzzing import ALL_EXAMPLES

pytestmark = pytest.mark.slow  # loads torch

BATCH, GROUP = 32, 2
JOB = f"""
job: j
task: {{class: 'examples.synthetic.task:Gaussian'}}
data: {{workers: 2, batch_size: {BATCH}}}
training: {{policy: {{name: doll, group_size: {GROUP}}}, optimizer: {{name: sgd, lr: 0.1, momentum: 0.5}}}}
"""


class Plane(Task):
    input_shape: tuple[int, ...] | None = (2,)
    num_classes: int | None = 2

    def build_model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(2, 2)

    def decode(self, record: bytes) -> Sample:
        raise NotImplementedError


class Normed(Plane):
    def build_model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(2, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        )


class Ids(Task):
    """An embedding of 50 rows."""

    num_classes = 2

    def build_model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Flatten(), torch.nn.Linear(4, 2))

    def decode(self, record: bytes) -> Sample:
        raise NotImplementedError

    def forward(self, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(x)
        return output


class Amounts(Plane):
    """Regression."""

    num_classes = None

    def build_model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(2, 1)


def points(seed: int, n: int = BATCH, task: Task | None = None) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    if isinstance(task, Ids):
        y = rng.integers(0, 2, n)
        return rng.integers(0, 25, (n, 1)) * 2 + y[:, None], y
    x = rng.normal(size=(n, 2)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] + 0.3 * rng.normal(size=n) > 0).astype(np.int64)
    if isinstance(task, Amounts):
        return x, x[:, 0] * 2 + rng.normal(size=n)
    return x, y


class World:
    """The server's and a worker's part of the work, without what is between them."""

    def __init__(self, task: Task, *overrides: str) -> None:
        self.task, self.config = task, parse(JOB, list(overrides))
        model = FlatModel(task.build_model())
        training = self.config.training
        self.optimizer = Optimizer(model, training.optimizer, training.clip_norm)
        self.computer = GradientComputer(task, FlatModel(task.build_model()))
        self.guard = Guard(self.config, task, self.computer)
        self.version = 0
        self.losses: list[float] = []
        self.bad: dict[int, dict[int, str]] = {}

    def restart_worker(self) -> None:
        self.guard = Guard(self.config, self.task, self.computer)

    def compute(self, x: np.ndarray, y: np.ndarray) -> GuardedGradient:
        self.computer.load(self.optimizer.weights)
        return self.guard.compute(x, y)

    def update(self, spoil: Callable[[int, np.ndarray, np.ndarray], Any] = lambda number, x, y: None) -> None:
        gradients, samples, loss = [], 0, 0.0
        for number in range(self.version * GROUP, (self.version + 1) * GROUP):
            x, y = points(number, task=self.task)
            spoil(number, x, y)
            gradient, bad = self.compute(x, y)
            if bad:
                self.bad[number] = bad
            samples += len(x) - len(bad)
            if gradient is not None:
                gradients.append(gradient.values.copy())
                loss += gradient.loss_sum
        self.optimizer.apply(gradients, 1 / max(samples, 1), samples)
        self.losses.append(loss / max(samples, 1))
        self.version += 1


ADAPTIVE = ("training.optimizer={name: adam, lr: 0.01}", "training.optimizer={name: adagrad, lr: 0.1}")


def run(task: Task, *overrides: str, spoil: Callable[[int, np.ndarray, np.ndarray], Any] | None = None) -> World:
    world = World(task, *overrides)
    for _ in range(12):
        world.update(spoil or (lambda number, x, y: None))
    return world


@functools.cache
def calm_run(make: Callable[[], Task], *overrides: str) -> World:
    return run(make(), *overrides)


def spoiling(number: int, x: Any, y: Any = None) -> Callable[[int, np.ndarray, np.ndarray], None]:
    """Sample 7 of batch `number` is replaced."""

    def spoil(now: int, xs: np.ndarray, ys: np.ndarray) -> None:
        if now == number:
            xs[7] = x
            ys[7] = ys[7] if y is None else y

    return spoil


LATE = 9 * GROUP
CASES = {
    "linear": (Plane, (3e38, -3e38), 0),
    "linear, less": (Plane, (-1e6, 1e6), 1),
    "regression, features": (Amounts, (1e15, 1e15), 0),
    "regression, target": (Amounts, (1, 1), -1e12),
    "batch norm": (Normed, (3e38, 1e38), 1),
    "batch norm, its statistics only": (Normed, (1e15, 1e15), 1),
    "not finite": (Amounts, (3e38, 3e38), 0),
    "out of range": (Ids, 50, 0),
    "far out of range": (Ids, 1 << 62, 0),
}


@pytest.mark.parametrize("number", [0, LATE], ids=["first batch", "later"])
@pytest.mark.parametrize("case", CASES)
def test_exactly_the_bad_sample_goes_and_the_model_is_that_of_an_undisturbed_run(case: str, number: int) -> None:
    make, x, y = CASES[case]
    calm = calm_run(make)
    world = run(make(), spoil=spoiling(number, x, y))
    assert calm.bad == {}
    assert {at: list(bad) for at, bad in world.bad.items()} == {number: [7]}
    assert world.losses[-1] == pytest.approx(calm.losses[-1], rel=0.1)


@pytest.mark.parametrize("optimizer", ADAPTIVE)
def test_an_adaptive_optimizer_is_guarded_from_a_gradient_that_would_stop_it_for_good(optimizer: str) -> None:
    calm = calm_run(Plane, optimizer)
    world = run(Plane(), optimizer, spoil=spoiling(LATE, (1e15, -1e15), 0))
    assert {at: list(bad) for at, bad in world.bad.items()} == {LATE: [7]}
    assert world.losses[-1] == pytest.approx(calm.losses[-1], rel=0.02)


@pytest.mark.parametrize("optimizer", ADAPTIVE)
def test_an_adaptive_optimizer_is_judged_alike_for_sums_and_for_means(optimizer: str) -> None:
    """Adam divides a sum by the size of sums, so the step has the same length."""
    after: list[float] = []
    for reduction in ("mean", "sum"):
        world = World(Plane(), optimizer, f"training.reduction={reduction}")
        world.computer.load(world.optimizer.weights)
        ordinary = SampleBatch(*points(0))
        gradient = world.computer.compute(*points(1, n=1))
        after.append(world.guard._loss_after(gradient, 0.5, ordinary))
    assert after[0] == after[1] != world.computer.loss(*ordinary)


def test_the_reason_says_how_long_and_how_bad() -> None:
    (reason,) = run(Plane(), spoil=spoiling(LATE, (1e10, -1e10), 0)).bad[LATE].values()
    assert "times as long as is usual, and its step would take the loss of ordinary samples from 0." in reason
    (reason,) = run(Ids(), spoil=spoiling(LATE, 50)).bad[LATE].values()
    assert reason == "IndexError: index out of range in self"


def test_steady_poison_does_not_become_usual() -> None:
    """One in twenty, from the first batch on, of every kind."""

    def spoil(number: int, x: np.ndarray, y: np.ndarray) -> None:
        x[3], y[3] = (10.0 ** (5 + number), 1.0), 0
        x[11], y[11] = (3e38, 3e38), 0

    world, calm = World(Plane()), World(Plane())
    for each in (world, calm):
        each.optimizer.weights[:] = (-0.5, -0.5, 0.5, 0.5, 0, 0)  # what is wrong is wrong for the model too
    for _ in range(5):
        world.update(spoil)
        calm.update()
    assert {number: set(bad) for number, bad in world.bad.items()} == {number: {3, 11} for number in range(5 * GROUP)}
    assert world.losses[-1] == pytest.approx(calm.losses[-1], rel=0.15)


@pytest.mark.parametrize(
    ("optimizer", "size"),
    [("{name: adam, lr: 0.01}", 1e4), ("{name: sgd, lr: 0.1}", 1e3), ("{name: adagrad, lr: 0.1}", 1e4)][
        : 3 if ALL_EXAMPLES else 1
    ],
)
def test_poison_that_the_model_gets_right_at_first_does_not_pass_later(optimizer: str, size: float) -> None:
    """The first sample of a batch is among the samples that judge the others afterwards. While the model gets a bad one
    right, it has no gradient and is learned; once it does not, its loss would fall with the step that ruins the model.
    """

    def spoil(number: int, x: np.ndarray, y: np.ndarray) -> None:
        x[::16], y[::16] = (size, size), 0

    world, calm = (World(Plane(), f"training.optimizer={optimizer}") for _ in range(2))
    for _ in range(40):
        world.update(spoil)
        calm.update()
    assert world.bad
    assert {at for bad in world.bad.values() for at in bad} == {0, 16}
    assert np.mean(world.losses[-5:]) == pytest.approx(np.mean(calm.losses[-5:]), rel=0.1)


def test_a_hard_sample_of_a_model_that_knows_all_the_others_is_learned() -> None:
    """Its gradient is thousands of times as long as that of its batch, and does no harm."""
    world = World(Plane())
    world.optimizer.weights[:] = (-40, -40, 40, 40, 0, 0)
    x, y = points(0)
    keep = np.abs(x[:, 0] + x[:, 1]) > 0.3
    x = np.where(keep[:, None], x, 1.0).astype(np.float32)
    y = (x.sum(axis=1) > 0).astype(np.int64)
    for _ in range(5):
        assert world.compute(x, y).bad == {}
    usual = world.computer.compute(x, y).norm
    y[7] = 1 - y[7]
    assert world.computer.compute(x, y).norm > 1000 * usual
    assert world.compute(x, y).bad == {}
    world.restart_worker()
    assert world.compute(x, y).bad == {}


def test_a_rare_target_is_learned() -> None:
    """Nearly all targets are 0: a gradient of another one is long with any features."""
    world = World(Amounts())
    world.optimizer.weights[:] = 0
    x, y = points(0, task=Amounts())
    y[:] = 1e-4
    for _ in range(5):
        assert world.compute(x, y).bad == {}
    y[7] = 50.0
    assert world.compute(x, y).bad == {}


def test_without_the_spike_test_only_what_has_no_finite_gradient_goes() -> None:
    world = World(Plane(), "training.guard.spike_factor=0")
    x, y = points(0)
    x[7], y[7] = (1e30, -1e30), 0
    assert world.compute(x, y).bad == {}
    assert list(World(Ids(), "training.guard.spike_factor=0").compute(np.array([[1], [99]]), y[:2]).bad) == [1]


class Broken(Plane):
    works = 0

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.works -= 1
        if self.works < 0:
            raise KeyError("no such key")
        return super().loss(output, target)


def test_a_task_that_fails_on_every_sample_is_told_from_bad_samples() -> None:
    world = World(Broken())
    with pytest.raises(TaskError, match=r"fails on every sample of its first batch \(KeyError: 'no such key'\)"):
        world.compute(*points(0))
    task = Broken()
    task.works = 10**6
    world = World(task)
    world.update()
    task.works = 0
    with pytest.raises(TaskError, match=r"also on samples that it has learned before .*no such key.*optimizer\.lr"):
        world.compute(*points(1))


def test_weights_at_which_every_sample_fails_are_not_the_samples_fault() -> None:
    world = World(Plane())
    world.update()
    world.optimizer.weights[:] = 1e38
    with pytest.raises(TaskError, match="the model has diverged or the task is wrong"):
        world.compute(points(1)[0] * 100, points(1)[1])


def test_a_learning_rate_that_is_too_high_is_not_the_samples_fault() -> None:
    """Every step breaks the model, and no sample is refused for it."""
    world = run(Plane(), "training.optimizer={name: sgd, lr: 1.0e+34}")
    assert world.losses[-1] > 1e30
    assert world.bad == {}


def test_a_batch_of_bad_samples_only_is_empty_where_others_were_learned() -> None:
    world = World(Ids())
    world.update()
    x, y = points(3, task=Ids())
    gradient, bad = world.compute(x + 1000, y)
    assert gradient is None
    assert len(bad) == BATCH
    assert world.compute(x, y).bad == {}


class Vouching(Ids):
    def holdout(self) -> Any:
        return [Sample([i], i % 2) for i in range(50)]


def test_the_first_batch_of_a_worker_may_be_all_bad_where_the_task_has_held_out_samples() -> None:
    x, y = points(3, task=Ids())
    assert len(World(Vouching()).compute(x + 1000, y).bad) == BATCH
    with pytest.raises(TaskError, match="fails on every sample"):
        World(Ids()).compute(x + 1000, y)


class Paired(Plane):
    """A loss that needs several samples."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(output) < 4:
            raise ValueError("expected 4 samples at least")
        if output.abs().max() > 1e6:
            raise ValueError("too large")
        return super().loss(output, target)


def test_a_loss_over_several_samples_is_asked_in_the_company_of_good_ones() -> None:
    world = World(Paired())
    world.update()
    x, y = points(5)
    x[7] = 1e9
    assert world.compute(x, y).bad == {7: "ValueError: too large"}


def test_a_machine_without_memory_is_not_the_samples_fault() -> None:
    class Large(Plane):
        def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    with pytest.raises(MemoryError, match="allocate memory"):
        World(Large()).compute(*points(0))


def test_a_usual_batch_costs_one_pass() -> None:
    world = World(Plane())
    world.update()
    passes = []
    forward = world.task.forward
    world.task.forward = lambda model, x: (passes.append(len(x)), forward(model, x))[1]  # type: ignore[method-assign]
    for _ in range(3):
        world.update()
    assert passes == [BATCH] * 3 * GROUP


def test_a_process_that_is_told_what_is_usual_does_not_inspect_its_first_batch() -> None:
    world = World(Plane())
    world.update()
    world.guard = Guard(world.config, world.task, world.computer, world.guard.usual)
    passes = []
    forward = world.task.forward
    world.task.forward = lambda model, x: (passes.append(len(x)), forward(model, x))[1]  # type: ignore[method-assign]
    world.update()
    assert passes == [BATCH] * GROUP


@pytest.mark.parametrize("told", [(), (float("nan"), 0.0), (1.0,)])
def test_a_process_that_is_told_nothing_of_use_inspects_its_first_batch(told: tuple[float, ...]) -> None:
    world = World(Plane())
    world.guard = Guard(world.config, world.task, world.computer, told)
    assert world.guard.usual == ()
    world.update(spoiling(0, (-1e6, 1e6), 1))
    assert set(world.bad[0]) == {7}


def test_a_bad_sample_in_the_first_batch_of_a_process_that_is_told_what_is_usual_is_refused() -> None:
    world = World(Plane())
    world.update()
    world.guard = Guard(world.config, world.task, world.computer, world.guard.usual)
    world.update(spoiling(GROUP, (-1e6, 1e6), 1))
    assert set(world.bad[GROUP]) == {7}


def test_hard_batches_of_a_model_that_knows_most_samples_cost_one_pass_each() -> None:
    """Late in training each third batch or so is unusual; a job went on at 60 % of its speed for it."""
    world = World(Plane())
    world.optimizer.weights[:] = (-40, -40, 40, 40, 0, 0)
    passes = []
    forward = world.task.forward
    world.task.forward = lambda model, x: (passes.append(len(x)), forward(model, x))[1]  # type: ignore[method-assign]
    for number in range(90):
        x, _ = points(number)
        x[np.abs(x[:, 0] + x[:, 1]) <= 0.3] = 1.0
        y = (x.sum(axis=1) > 0).astype(np.int64)
        if number % 3 == 2:
            y[7] = 1 - y[7]
        assert world.compute(x, y).bad == {}
    assert len(passes) <= 90 + 80  # two inspections: of the first batch, and of the first hard one
    x[7], y[7] = (1e6, 1e6), 0
    assert set(world.compute(x, y).bad) == {7}, "a bad sample goes meanwhile"


def _of(loss: Callable[[torch.Tensor, torch.Tensor], Any]) -> Task:
    return type("Wrong", (Plane,), {"loss": lambda self, output, target: loss(output, target)})()


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (
            _of(lambda output, target: torch.nn.functional.cross_entropy(output, target, reduction="none")),
            r"Wrong.loss\(\): expected the mean over the batch, .* shape \(\d+,\): return its mean\(\), or name the",
        ),
        (_of(lambda output, target: 0.5), r"Wrong.loss\(\): expected the mean over the batch, .* got float"),
        (
            _of(lambda output, target: torch.tensor(float(output.argmax(dim=1).ne(target).sum()))),
            r"Wrong: expected a loss with a gradient, got one without: compute it from",
        ),
        # One sample alone has a loss, because its shapes are stretched to each other.
        (
            _of(lambda output, target: ((output - target) ** 2).mean()),
            r"fails on a batch \(RuntimeError: The size of tensor.*compare the shapes of output and target",
        ),
        (
            _of(lambda output, target: torch.nn.functional.cross_entropy(output, target[:, None])),
            r"fails on every sample of its first batch \(",
        ),
    ],
)
def test_a_loss_that_is_none_is_the_tasks_fault_and_says_what_to_do(task: Task, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        World(task).compute(*points(0))


def test_samples_are_not_blamed_while_the_model_diverges() -> None:
    """Far away from where it has learned, what is a little unlike the others is far beyond them."""
    for diverges in (False, True):
        world = run(Amounts())
        if diverges:
            world.optimizer.weights[:] = 500.0
        x, y = points(99, task=Amounts())
        x[3] *= 60
        gradient, bad = world.compute(x, y)
        assert gradient is not None
        assert (3 in bad) == (not diverges)


def test_a_sample_that_only_a_diverged_model_cannot_compute_is_not_blamed() -> None:
    """At these weights the loss of ordinary samples is 1e30 times the first one, and that of larger ones infinite."""
    for factor, diverges in ((1e25, False), (1e4, True)):
        world = run(Amounts())
        if diverges:
            world.optimizer.weights[:] = 1e17
        x, y = points(99, task=Amounts())
        x[3] *= factor
        if diverges:
            with pytest.raises(TaskError, match=r"the model has diverged: .* no sample is refused for that; lower"):
                world.compute(x, y)
        else:
            assert list(world.compute(x, y)[1]) == [3]


def test_one_learned_sample_with_a_large_loss_is_no_divergence() -> None:
    """Otherwise a producer could end the job with two samples: one with a large loss, and one that is not finite."""
    world = run(Amounts())
    x, y = points(98, task=Amounts())
    x[5], y[5] = 0.0, 3e3
    world.compute(x, y)
    x, y = points(99, task=Amounts())
    x[3] = np.nan
    assert list(world.compute(x, y)[1]) == [3]


def test_a_new_process_knows_the_loss_of_the_jobs_first_batch() -> None:
    world = run(Amounts())
    first = Guard(world.config, world.task, world.computer, world.guard.usual)._losses.first
    assert first == world.guard._losses.first == pytest.approx(world.losses[0], rel=0.5)
    assert math.isnan(Guard(world.config, world.task, world.computer, world.guard.usual[:2])._losses.first)
