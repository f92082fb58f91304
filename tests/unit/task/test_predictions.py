"""Records without a target, and what a task answers by default."""

from __future__ import annotations

import json
from typing import Annotated, Any

import doll
import msgspec
import numpy as np
import pytest
import torch
from doll.errors import ConfigError, SampleError
from doll.task.base import Sample, Task

pytestmark = pytest.mark.slow  # loads torch


class Event(msgspec.Struct, rename="camel"):
    age: float
    num_visits: int
    left_at: Annotated[int, msgspec.Meta(ge=1)]
    plan: str = "free"
    tags: list[str] = []
    reason: str | None = None


class Churn(doll.JsonTask):
    record = Event
    targets = ("left_at", "reason")

    def samples(self, columns: Any) -> Any:
        x = np.stack([columns["age"] / 50, columns["num_visits"]], axis=1)
        return x, columns["left_at"] + np.array([reason is None for reason in columns["reason"]])


def test_a_record_for_a_prediction_may_lack_what_the_target_is_made_of() -> None:
    task = Churn()
    assert task.decode_features(b'{"age": 100, "numVisits": 3}').tolist() == [2.0, 3.0]
    assert task.decode_features(b'{"age": 100, "numVisits": 3, "leftAt": 7, "tags": ["a"]}').tolist() == [2.0, 3.0]
    with pytest.raises(msgspec.ValidationError, match="numVisits"):
        task.decode_features(b'{"age": 100}')
    with pytest.raises(msgspec.ValidationError):
        task.decode(b'{"age": 100, "numVisits": 3}')


def test_targets_are_fields() -> None:
    class Wrong(Churn):
        targets = ("gone", "leftAt")

    with pytest.raises(ConfigError, match="expected targets among its fields"):
        Wrong().decode_features(b"{}")


class Plain(Task):
    def decode(self, record: bytes) -> Any:
        values = json.loads(record)
        return [Sample(value, 0) for value in values] if isinstance(values, list) else Sample(values["a"], values["y"])


def test_any_task_takes_x_itself_or_a_whole_record() -> None:
    assert Plain().decode_features(b'{"x": [1, 2]}') == [1, 2]
    assert Plain().decode_features(b'{"a": 5, "y": 1}') == 5
    assert Plain().decode_features(b"[3]") == 3
    with pytest.raises(SampleError, match="expected a record of one sample"):
        Plain().decode_features(b"[3, 4]")
    assert doll.GreyImageTask().decode_features(b'{"x": [[1, 2], [3, 4]]}') == [[1, 2], [3, 4]]


def predicted(task: Task, output: Any) -> dict[str, Any]:
    return {name: value.tolist() for name, value in task.predict(output).items()}


def test_a_classification_has_classes_and_probabilities() -> None:
    class Classes(Task):
        num_classes = 2

    answer = predicted(Classes(), torch.tensor([[0.0, 0.0], [2.0, 1.0]]))
    assert answer["class"] == [0, 0]
    assert answer["probabilities"][0] == [0.5, 0.5]
    assert sum(answer["probabilities"][1]) == pytest.approx(1)
    assert predicted(Classes(), torch.tensor([0.5])) == {"value": [0.5]}, "one number, which is no class"


def test_a_regression_has_a_value() -> None:
    assert predicted(Task(), torch.tensor([[1.0], [2.0]])) == {"value": [1, 2]}
    assert predicted(Task(), torch.tensor([1.0])) == {"value": [1]}
    assert predicted(Task(), torch.ones(1, 3)) == {"output": [[1, 1, 1]]}
    tree = {"click": torch.zeros(1, 2), "amount": torch.ones(1)}
    assert predicted(Task(), tree) == {"amount": [1], "click": [[0, 0]]}


def test_a_ranking_has_scores_and_ranks() -> None:
    class Ranks(Task):
        def losses(self, output: Any, target: Any, group: Any = None) -> Any:
            raise NotImplementedError

    assert predicted(Ranks(), torch.tensor([[1.0], [3.0], [2.0]])) == {"score": [1, 3, 2], "rank": [2, 0, 1]}
