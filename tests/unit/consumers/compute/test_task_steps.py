"""Tasks that define their own step: what reaches the model, and whose fault a failure is."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from doll.config import JobConfig, parse
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.compute.step_model import StepModel
from doll.consumers.compute.task_steps import OwnSteps
from doll.errors import ConfigError, TaskError
from doll.model.flat_model import FlatModel, build
from doll.task.base import Task
from memory_stores import MemoryBlobs

pytestmark = pytest.mark.slow  # loads torch

JOB = """
job: unit
task: {class: "m:C"}
training: {policy: {name: asp, contribution: step}}
"""


class Histogram(Task):
    """Counts its samples by value; a negative one is the task's own error."""

    def build_model(self) -> torch.nn.Module:
        module = torch.nn.Module()
        module.register_parameter("counts", torch.nn.Parameter(torch.zeros(4)))
        return module

    def step(
        self, weights: npt.NDArray[np.float32], x: npt.NDArray[Any], y: npt.NDArray[Any], rng: np.random.Generator
    ) -> npt.NDArray[np.float32]:
        if (x < 0).any():
            raise ValueError("a negative sample")
        step: npt.NDArray[np.float32] = np.bincount(x.astype(int), minlength=4).astype(np.float32)
        step[3] = rng.integers(1000)
        return step

    def forward(self, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        return model.get_parameter("counts").sum() + torch.zeros(len(x))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.mean()

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
        return {"count": float(len(output))}


class Rig:
    def __init__(self, task: Task | None = None, worker: int = 1) -> None:
        self.config: JobConfig = parse(JOB)
        self.task = task or Histogram()
        self.model: FlatModel = build(self.config, self.task)
        self.steps = OwnSteps(self.config, self.task, self.model, worker)

    def compute(self, *values: float, batch: int = 0) -> Any:
        x = np.array(values, np.float32)
        return self.steps.compute(x, np.zeros(len(x), np.float32), batch=batch)


def test_the_step_is_the_tasks_and_the_loss_is_of_the_weights_before_it() -> None:
    rig = Rig()
    with torch.no_grad():
        rig.model.flat[:] = 5.0
    gradient, bad = rig.compute(0, 1, 1, 2)
    assert not bad
    assert gradient.values[:3].tolist() == [1, 2, 1]
    assert (gradient.loss_sum, gradient.metric_sums) == (80.0, {"count": 16.0})
    assert (rig.model.flat == 5.0).all(), "the weights are as they were"


def test_a_batch_draws_the_same_numbers_whenever_it_is_computed_and_another_one_others() -> None:
    draws = [
        Rig(worker=worker).compute(0, batch=batch).gradient.values[3]
        for worker, batch in ((1, 7), (1, 7), (1, 8), (2, 7))
    ]
    assert draws[0] == draws[1]
    assert len({float(draw) for draw in draws}) == 3


def test_samples_at_which_the_task_fails_are_named_and_the_others_learned() -> None:
    gradient, bad = Rig().compute(0, -1, 1, -2, 2)
    assert sorted(bad) == [1, 3]
    assert all("ValueError: a negative sample" in reason for reason in bad.values())
    assert gradient.values[:3].tolist() == [1, 1, 1]


def test_a_task_that_fails_on_everything_is_at_fault_itself() -> None:
    with pytest.raises(TaskError, match="fails on every sample"):
        Rig().compute(-1, -2)


@pytest.mark.parametrize("step", [np.zeros(3, np.float32), np.zeros(4), [0.0] * 4])
def test_a_step_of_another_form_is_refused(step: Any) -> None:
    class Wrong(Histogram):
        def step(self, *_: Any) -> Any:
            return step

    with pytest.raises(TaskError, match=r"expected a float32 array of shape \(4,\), got"):
        Rig(Wrong()).compute(0)


def test_a_step_that_is_not_finite_is_not_learned() -> None:
    class Infinite(Histogram):
        def step(self, weights: Any, *_: Any) -> Any:
            return np.full_like(weights, np.inf)

    with pytest.raises(TaskError, match="the step is not finite"):
        Rig(Infinite()).compute(0)


def test_the_step_is_added_to_the_view_and_pushed_as_it_is() -> None:
    rig = Rig()
    computer = GradientComputer(rig.task, rig.model)
    model = StepModel("unit", MemoryBlobs(), rig.config.training, rig.model, computer, takes_steps=True)
    for batch in range(2):
        gradient, _ = rig.compute(0, 1, 1, batch=batch)
        assert model.add(gradient, batch=batch, num_samples=3)
    pushed = model.values()
    assert pushed is not None
    assert pushed[:3].tolist() == [2, 4, 0]
    assert rig.model.flat[:3].tolist() == [2, 4, 0]


def test_a_policy_of_gradients_is_refused() -> None:
    config = parse(JOB.replace("{name: asp, contribution: step}", "{name: asp}"))
    with pytest.raises(ConfigError, match=r"defines step\(\): expected a training.policy whose workers send steps"):
        build(config, Histogram())
