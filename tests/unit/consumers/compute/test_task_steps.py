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
from doll.errors import BlobError, ConfigError, TaskError
from doll.model.flat_model import FlatModel, build
from doll.tables.rows import LookUp, Rows
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
    def __init__(self, task: Task | None = None) -> None:
        self.config: JobConfig = parse(JOB)
        self.task = task or Histogram()
        self.model: FlatModel = build(self.config, self.task)
        self.steps = OwnSteps(self.config, self.task, self.model)

    def compute(self, *values: float, seed: int = 0) -> Any:
        x = np.array(values, np.float32)
        return self.steps.compute(x, np.zeros(len(x), np.float32), seed=seed)


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
    first, again, other = (Rig().compute(0, seed=seed).gradient.values[3] for seed in (7, 7, 8))
    assert first == again != other


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
        gradient, _ = rig.compute(0, 1, 1, seed=batch)
        assert model.add(gradient, batch=batch)
    pushed = model.values()
    assert pushed is not None
    assert pushed[:3].tolist() == [2, 4, 0]
    assert rig.model.flat[:3].tolist() == [2, 4, 0]


def test_a_policy_of_gradients_is_refused() -> None:
    config = parse(JOB.replace("{name: asp, contribution: step}", "{name: asp}"))
    with pytest.raises(ConfigError, match=r"defines step\(\): expected a training.policy whose workers send steps"):
        build(config, Histogram())


# --- tables --------------------------------------------------------------------------------------------------------


class Counting(Histogram):
    """Counts its samples in rows of a table of two columns: how often, and how often by now."""

    def build_model(self) -> torch.nn.Module:
        module = super().build_model()
        module.seen = torch.nn.Embedding(4, 2, sparse=True)
        torch.nn.init.zeros_(module.seen.weight)
        return module

    def step_rows(self, weights: Any, look_up: LookUp, x: Any, y: Any, rng: Any) -> Any:
        ids, counts = np.unique(x.astype(np.int64), return_counts=True)
        now = look_up("seen.weight", ids)[:, 0] + counts
        values = np.stack([counts, now], axis=1).astype(np.float32)
        return self.step(weights, x, y, rng), {"seen.weight": Rows(ids, values)}


def _rig(task: Task, rows: npt.NDArray[np.float32] | None = None) -> Rig:
    rig = Rig(task)
    table = np.zeros((4, 2), np.float32) if rows is None else rows
    assert rig.model.tables is not None
    rig.model.tables.connect(lambda name, ids: table[ids])
    return rig


def test_a_step_of_rows_is_of_the_rows_as_they_are() -> None:
    table = np.full((4, 2), 5.0, np.float32)
    gradient, bad = _rig(Counting(), table).compute(0, 2, 2)
    assert not bad
    ids, values = gradient.rows["seen.weight"]
    assert (ids.tolist(), values.tolist()) == ([0, 2], [[1, 6], [2, 7]])
    assert gradient.values[:3].tolist() == [1, 0, 2]
    assert gradient.norm == pytest.approx(float(np.linalg.norm([*gradient.values, 1, 6, 2, 7])))
    assert (table == 5.0).all()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"other": ([0], [[1, 1]])}, r"table 'other': expected one of \['seen.weight'\]"),
        ({"seen.weight": ([1, 0], [[1, 1], [1, 1]])}, "expected strictly increasing ids of 0 to 3"),
        ({"seen.weight": ([4], [[1, 1]])}, "expected strictly increasing ids of 0 to 3"),
        ({"seen.weight": ([0], [[1]])}, r"expected float32 values of shape \(1, 2\)"),
    ],
)
def test_rows_that_are_none_of_the_tables_are_the_tasks_fault(rows: dict[str, Any], says: str) -> None:
    class Wrong(Counting):
        def step_rows(self, weights: Any, look_up: LookUp, x: Any, y: Any, rng: Any) -> Any:
            made = {name: Rows(np.array(ids), np.array(values, np.float32)) for name, (ids, values) in rows.items()}
            return self.step(weights, x, y, rng), made

    with pytest.raises(TaskError, match=says):
        _rig(Wrong()).compute(0)


@pytest.mark.parametrize("ids", [[1.0], [2, 1], [-1], [[0]]])
def test_ids_that_are_no_rows_are_refused(ids: list[Any]) -> None:
    class Wrong(Counting):
        def step_rows(self, weights: Any, look_up: LookUp, x: Any, y: Any, rng: Any) -> Any:
            look_up("seen.weight", np.array(ids))

    with pytest.raises(TaskError, match=r"fails on every sample.*table 'seen.weight': expected"):
        _rig(Wrong()).compute(0, 1)


def test_rows_that_do_not_come_are_nobodys_fault() -> None:
    rig = _rig(Counting())
    assert rig.model.tables is not None

    def fails(name: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        raise BlobError("no rows")

    rig.model.tables.connect(fails)
    with pytest.raises(BlobError, match="no rows"):
        rig.compute(0)


def test_rows_that_are_not_finite_are_not_learned() -> None:
    with pytest.raises(TaskError, match="the step is not finite"):
        _rig(Counting(), np.full((4, 2), np.inf, np.float32)).compute(0)


def test_a_model_with_tables_needs_steps_of_rows() -> None:
    class OnlyDense(Counting):
        step_rows = Task.step_rows

    with pytest.raises(ConfigError, match=r"expected a model without tables, got 'seen.weight': define step_rows\(\)"):
        build(parse(JOB), OnlyDense())
    with pytest.raises(ConfigError, match=r"defines step_rows\(\): expected a training.policy"):
        build(parse(JOB, ["training.policy={name: bsp}"]), Counting())
