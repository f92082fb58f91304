"""Held-out error: weighted over chunks, and clear about a task that fails."""

from collections.abc import Iterable

import pytest
import torch
from doll.errors import ConfigError
from doll.evaluation.heldout import CHUNK_SAMPLES, HeldOut
from doll.task.base import Sample, Task

pytestmark = pytest.mark.slow  # loads torch


class Constant(Task):
    """The held-out target of sample i is i; the model says 0."""

    def __init__(self, samples: int = CHUNK_SAMPLES + 7):
        self.samples = samples

    def build_model(self) -> torch.nn.Module:
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        return model

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
        return {"mean_target": float(target.double().mean())}

    def holdout(self) -> Iterable[Sample]:
        return (Sample([1.0], float(i)) for i in range(self.samples))


def test_an_uneven_last_chunk_has_its_weight_and_no_more() -> None:
    task = Constant()
    held_out = HeldOut(task, 10_000)
    count = CHUNK_SAMPLES + 7
    error = held_out.evaluate(task.build_model())
    assert len(held_out) == count
    assert error.loss == pytest.approx(sum(i * i for i in range(count)) / count, rel=1e-5)
    assert error.metrics["mean_target"] == pytest.approx((count - 1) / 2)
    assert error.accuracy is None


@pytest.mark.parametrize("size", [7, 2 * CHUNK_SAMPLES])
def test_a_group_is_computed_as_a_whole(size: int) -> None:
    class Grouped(Constant):
        def metrics(
            self, output: torch.Tensor, target: torch.Tensor, group: torch.Tensor | None = None
        ) -> dict[str, float]:
            assert group is not None
            return {"size": float(group.unique(return_counts=True)[1].max())}

        def holdout(self) -> Iterable[Sample]:
            return (Sample([1.0], 0.0, group=at // size) for at in range(4 * CHUNK_SAMPLES // size * size))

    assert HeldOut(Grouped(), 10_000).evaluate(Grouped().build_model()).metrics == {"size": size}


def test_only_max_samples_are_taken_even_from_an_endless_set() -> None:
    assert len(HeldOut(Constant(10**12), 5)) == 5


def test_dropout_is_off() -> None:
    task = Constant()
    model = torch.nn.Sequential(torch.nn.Dropout(0.9), task.build_model())
    HeldOut(task, 10).evaluate(model)
    assert not model.training


def test_a_holdout_that_fails_is_the_tasks_fault() -> None:
    class Broken(Constant):
        def holdout(self) -> Iterable[Sample]:
            raise FileNotFoundError("t10k-images.gz")

    with pytest.raises(ConfigError, match=r"Broken\.holdout\(\) failed: FileNotFoundError: t10k"):
        HeldOut(Broken(), 10)


def test_a_loss_that_fails_is_the_tasks_fault() -> None:
    class Broken(Constant):
        def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            raise IndexError("class 10 of 10")

    task = Broken()
    with pytest.raises(ConfigError, match="class 10 of 10"):
        HeldOut(task, 10).evaluate(task.build_model())
