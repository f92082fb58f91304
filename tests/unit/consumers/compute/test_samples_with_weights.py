"""A weight of 2 is the same sample twice; dicts, groups and sequences reach the model, and the guard takes them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from doll.config import parse
from doll.consumers.compute.gradient import Gradient, GradientComputer
from doll.consumers.compute.guard import Guard
from doll.consumers.compute.task_steps import OwnSteps
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.errors import TaskError
from doll.evaluation.heldout import HeldOut
from doll.model.flat_model import FlatModel
from doll.task.base import Sample, Task
from doll.task.batches import SampleBatch, batch_of
from doll.task.forms import group_of
from tree_tasks import Texts, Visits, visit

pytestmark = pytest.mark.slow  # loads torch

JOB = """
job: j
task: {class: 'tree_tasks:Visits'}
data: {workers: 2, batch_size: 16}
training: {policy: {name: doll, group_size: 2}, optimizer: {name: sgd, lr: 0.1}}
"""


class Rows(Task):
    """Classes, or numbers, of three numbers."""

    def __init__(self, num_classes: int | None = 2) -> None:
        self.num_classes = num_classes

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(3, 2 if self.num_classes else 1)


def computer_of(task: Task) -> GradientComputer:
    torch.manual_seed(0)
    return GradientComputer(task, FlatModel(task.build_model()))


def rows(seed: int, n: int = 16, num_classes: int | None = 2) -> SampleBatch:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)).astype(np.float32)
    y = rng.integers(2, size=n) if num_classes else rng.normal(size=n)
    return SampleBatch(x, y, rng.integers(0, 4, size=n).astype(np.float32))


def repeated(batch: SampleBatch) -> SampleBatch:
    """Each sample as often as its weight says."""
    assert batch.weight is not None
    return batch.unweighted().take(np.repeat(np.arange(batch.num_samples), batch.weight.astype(int)).tolist())


def assert_same(weighted: Gradient, other: Gradient) -> None:
    np.testing.assert_allclose(weighted.values, other.values, rtol=2e-5, atol=2e-6)
    assert weighted.weight == other.weight
    assert weighted.loss_sum == pytest.approx(other.loss_sum, rel=1e-5)
    assert weighted.metric_sums == pytest.approx(other.metric_sums, rel=1e-6)


@pytest.mark.parametrize("num_classes", [2, None])
def test_a_weight_is_so_many_samples_with_the_losses_that_there_are(num_classes: int | None) -> None:
    computer, batch = computer_of(Rows(num_classes)), rows(1, num_classes=num_classes)
    weighted = computer.compute(*batch)
    weighted = weighted._replace(vector=weighted.vector.clone())
    assert_same(weighted, computer.compute(*repeated(batch)))
    assert weighted.weight == batch.total_weight != batch.num_samples


def test_weights_of_one_alone_change_nothing_to_the_bit() -> None:
    computer, batch = computer_of(Rows()), rows(1)
    plain = computer.compute(*batch.unweighted()).values.copy()
    twos = computer.compute(batch.x, batch.y, np.full(16, 2, np.float32)).values
    np.testing.assert_allclose(twos, 2 * plain, rtol=1e-6)
    assert computer.compute(*batch.unweighted()).values.tobytes() == plain.tobytes()


def visits(seed: int, n: int = 24, make: Callable[[np.random.Generator], tuple[Any, Any]] = visit) -> SampleBatch:
    rng = np.random.default_rng(seed)
    task = Texts() if make is not visit else Visits()
    return batch_of(task, (Sample(*make(rng), weight=float(rng.integers(1, 3))) for _ in range(n)))


def test_dicts_and_tuples_reach_the_model_with_their_types() -> None:
    seen: list[Any] = []

    class Watching(Visits):
        def forward(self, model: torch.nn.Module, x: Any) -> Any:
            seen.append((x["numbers"].dtype, x["words"][0].dtype, x["words"][1].dtype))
            return super().forward(model, x)

    computer, batch = computer_of(Watching()), visits(2)
    weighted = computer.compute(*batch)
    weighted = weighted._replace(vector=weighted.vector.clone())
    assert_same(weighted, computer.compute(*repeated(batch)))
    assert set(seen) == {(torch.float32, torch.int32, torch.bool)}


def test_sequences_of_any_length_are_put_together_by_the_task() -> None:
    computer = computer_of(Texts())
    batch = visits(3, make=lambda rng: visit(rng, int(rng.integers(1, 513))))
    together = computer.compute(*batch)
    values, loss_sum = together.values.copy(), together.loss_sum
    alone = [computer.compute(*batch.take([at])) for at in range(batch.num_samples)]
    assert loss_sum == pytest.approx(sum(item.loss_sum for item in alone), rel=1e-5)
    total = np.zeros_like(values)
    for at in range(batch.num_samples):
        total += computer.compute(*batch.take([at])).values
    np.testing.assert_allclose(values, total, rtol=1e-4, atol=1e-5)


def test_held_out_means_are_by_weight() -> None:
    class HeldOutRows(Rows):
        def __init__(self, batch: SampleBatch) -> None:
            super().__init__()
            self.batch = batch

        def holdout(self) -> list[Sample]:
            weights = [1.0] * self.batch.num_samples if self.batch.weight is None else self.batch.weight.tolist()
            return list(map(Sample, self.batch.x, self.batch.y, weights))

    batch, model = rows(5, 300), Rows().build_model()
    weighted = HeldOut(HeldOutRows(batch), 1000).evaluate(model)
    other = HeldOut(HeldOutRows(repeated(batch)), 1000).evaluate(model)
    assert weighted.loss == pytest.approx(other.loss, rel=1e-6)
    assert weighted.metrics == pytest.approx(other.metrics)


@pytest.mark.parametrize("task", [Visits(), Texts()])
def test_dicts_are_held_out(task: Visits) -> None:
    error = HeldOut(task, 30).evaluate(task.build_model())
    assert np.isfinite(error.loss)
    assert 0 <= error.metrics["accuracy"] <= 1


# --- the task's own losses --------------------------------------------------------------------------------------------


class OwnMean(Rows):
    def loss(self, output: Any, target: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, target)


def test_weights_are_refused_where_the_loss_is_a_mean_without_them() -> None:
    computer, batch = computer_of(OwnMean()), rows(1)
    computer.compute(*batch.unweighted())
    guard = Guard(parse(JOB), OwnMean(), computer)
    with pytest.raises(TaskError, match=r"OwnMean: samples have weights.*define losses\(output, target\)"):
        guard.compute(*batch)


def test_weights_are_refused_where_a_metric_is_a_mean_without_them() -> None:
    class OwnMetric(Rows):
        def metrics(self, output: Any, target: Any) -> dict[str, float]:
            return {"bias": float(output.mean())}

    with pytest.raises(TaskError, match="for 'bias': return a tensor"):
        computer_of(OwnMetric()).compute(*rows(1))


def test_a_loss_that_takes_weights_returns_their_mean() -> None:
    class Taking(Rows):
        def loss(self, output: Any, target: Any, weight: torch.Tensor | None = None) -> torch.Tensor:
            losses = torch.nn.functional.cross_entropy(output, target, reduction="none")
            return losses.mean() if weight is None else (losses * weight).sum() / weight.sum()

    batch = rows(1)
    taking = computer_of(Taking()).compute(*batch)
    taking = taking._replace(vector=taking.vector.clone())
    assert_same(taking, computer_of(Rows()).compute(*batch))


def test_losses_of_another_shape_are_the_tasks_fault() -> None:
    class Wrong(Rows):
        def losses(self, output: Any, target: Any) -> torch.Tensor:
            return torch.ones(3)

    with pytest.raises(TaskError, match=r"Wrong.losses\(\): expected one loss for each of 16 samples"):
        computer_of(Wrong()).compute(*rows(1))


def test_groups_reach_the_methods_that_ask_for_them() -> None:
    class Ranking(Rows):
        """The mean over groups of their listwise losses."""

        def forward(self, model: torch.nn.Module, x: Any, group: torch.Tensor | None = None) -> Any:
            assert group is not None
            return model(x)[:, 0]

        def loss(self, output: Any, target: Any, group: torch.Tensor | None = None) -> torch.Tensor:
            assert group is not None
            parts = [output[group == number] for number in group.unique()]
            return torch.stack([part.logsumexp(0) - part[0] for part in parts]).mean()

        def metrics(self, output: Any, target: Any, group: torch.Tensor | None = None) -> dict[str, float]:
            assert group is not None
            return {"groups": float(len(group.unique()))}

    batch = rows(1).unweighted()._replace(group=np.array([group_of(f"query {at // 4}") for at in range(16)]))
    gradient = computer_of(Ranking()).compute(*batch)
    assert gradient.metric_sums == {"groups": 4 * 16}
    assert gradient.norm > 0


@pytest.mark.parametrize("weight", [None, np.ones(16, np.float32), np.zeros(16, np.float32)])
def test_losses_get_groups_with_weights_and_without(weight: Any) -> None:
    class Listwise(Rows):
        def losses(self, output: Any, target: Any, group: torch.Tensor | None = None) -> torch.Tensor:
            assert group is not None
            shares = torch.cat([output[group == number, 0].log_softmax(0) for number in range(4)])
            return -shares

    batch = rows(1).unweighted()._replace(group=np.arange(16) // 4, weight=weight)
    gradient = computer_of(Listwise()).compute(*batch)
    assert (gradient.loss_sum > 16) == (gradient.norm > 0) == (batch.total_weight > 0)


def test_a_step_of_the_tasks_own_gets_weights_or_refuses_them() -> None:
    class Step(Rows):
        def step(self, weights: Any, x: Any, y: Any, rng: Any) -> Any:
            return np.zeros_like(weights)

    class Weighing(Rows):
        def step(self, weights: Any, x: Any, y: Any, rng: Any, weight: Any = None) -> Any:
            return np.full_like(weights, 0 if weight is None else weight.sum())

    config, batch = parse(JOB), rows(1)
    with pytest.raises(TaskError, match=r"expected step\(\) to have a parameter weight"):
        OwnSteps(config, Step(), FlatModel(Step().build_model())).compute(*batch, seed=0)
    gradient, _ = OwnSteps(config, Weighing(), FlatModel(Weighing().build_model())).compute(*batch, seed=0)
    assert gradient is not None
    assert set(gradient.values.tolist()) == {batch.total_weight}


# --- the guard --------------------------------------------------------------------------------------------------------


def texts(rng: np.random.Generator) -> tuple[Any, Any]:
    return visit(rng, int(rng.integers(1, 40)))


@pytest.mark.parametrize("make", [visit, texts])
def test_the_guard_finds_the_sample_that_cannot_be_computed(make: Any) -> None:
    task = Visits() if make is visit else Texts()
    guard = Guard(parse(JOB), task, computer_of(task))
    for seed in range(4):
        assert guard.compute(*visits(seed, make=make)).bad == {}
    rng = np.random.default_rng(9)
    samples = [Sample(*make(rng))._replace(weight=2.0) for _ in range(20)]
    samples[13].x["words"][0][0] = 77  # of 50 rows
    gradient, bad = guard.compute(*batch_of(task, samples))
    assert list(bad) == [13]
    assert gradient is not None
    assert gradient.weight == 38


@pytest.mark.parametrize("make", [visit, texts])
def test_the_guard_finds_the_sample_that_would_break_the_model(make: Any) -> None:
    task = Visits() if make is visit else Texts()
    guard = Guard(parse(JOB), task, computer_of(task))
    for seed in range(4):
        assert guard.compute(*visits(seed, make=make)).bad == {}
    rng = np.random.default_rng(9)
    samples = [Sample(*make(rng))._replace(weight=float(1 + at % 2)) for at in range(20)]
    samples[5] = samples[5]._replace(y={"clicked": 0, "paid": np.float32(1e6)})
    gradient, bad = guard.compute(*batch_of(task, samples))
    assert list(bad) == [5]
    assert "its step would take the loss" in bad[5]
    assert gradient is not None


def test_a_heavy_sample_is_not_a_bad_one() -> None:
    task = Visits()
    guard = Guard(parse(JOB), task, computer_of(task))
    for seed in range(4):
        guard.compute(*visits(seed))
    batch = visits(9)
    heavy = batch._replace(weight=np.array([1e4, *[1.0] * 23], np.float32))
    assert guard.compute(*heavy).bad == {}


def test_samples_without_any_weight_are_computed_and_add_nothing() -> None:
    task = Visits()
    guard = Guard(parse(JOB), task, computer_of(task))
    guard.compute(*visits(0))
    gradient, bad = guard.compute(*visits(1)._replace(weight=np.zeros(24, np.float32)))
    assert gradient is not None
    assert (gradient.weight, gradient.loss_sum, gradient.norm, bad) == (0.0, 0.0, 0.0, {})


def test_dicts_survive_decoding_one_by_one_and_in_bulk_into_the_same_gradient() -> None:
    task, rng = Visits(), np.random.default_rng(4)
    values = [task.make(rng, at) for at in range(32)]

    class Single(Visits):
        def decode_many(self, values: Sequence[bytes]) -> Any:
            return None

    gradients = []
    for each in (task, Single()):
        decoded = decode_records(each, RawRecords(range(32), values), samples_per_record=1, max_record_bytes=10_000)
        gradients.append(computer_of(each).compute(*decoded.samples).values.tobytes())
    assert gradients[0] == gradients[1]
