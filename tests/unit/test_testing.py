"""`doll.testing.check_task`: good tasks pass, and each kind of bad one is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from doll import Sample, Task
from doll.errors import SampleError
from doll.testing import check_task
from examples.intrusion.task import Intrusion
from examples.synthetic.task import Gaussian

pytestmark = pytest.mark.slow  # loads torch

RNG = np.random.default_rng(5)
POINTS = RNG.normal(size=(80, 2)).round(3)
RECORDS = [json.dumps({"x": point.tolist(), "y": int(point.sum() > 0)}).encode() for point in POINTS]
KDD = (
    b"0,tcp,http,SF,181,5450,0,0,0,0,0,1,0,0,0,0,0,0,0,0,0,0,8,8,0.00,0.00,0.00,0.00,1.00,0.00,0.00,"
    b"9,9,1.00,0.00,0.11,0.00,0.00,0.00,0.00,0.00,normal."
)


class Points(Task):
    """A task that does all that it should."""

    input_shape = (2,)
    num_classes = 2

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 2)

    def decode(self, record: bytes) -> Sample:
        point = json.loads(record)
        return Sample(point["x"], point["y"])

    def decode_many(self, values: Any) -> Any:
        points = [json.loads(value) for value in values]
        return np.array([point["x"] for point in points], np.float32), np.array([point["y"] for point in points])


class OtherBulk(Points):
    def decode_many(self, values: Any) -> Any:
        x, y = super().decode_many(values)
        return x / 2, y


class TakesAll(Points):
    def decode(self, record: bytes) -> Sample:
        try:
            return super().decode(record)
        except ValueError:
            return Sample([0, 0], 0)


class Changing(Points):
    def build_model(self) -> torch.nn.Module:
        model = torch.nn.Linear(2, 2)
        torch.nn.init.uniform_(model.weight, generator=torch.Generator().manual_seed(int(RNG.integers(1 << 30))))
        return model


class Frozen(Points):
    def loss(self, output: Any, target: Any) -> torch.Tensor:
        return super().loss(output, target) * 0 + output.sum() * 0 + 1


class Forgetful(Points):
    def build_model(self) -> torch.nn.Module:
        model = torch.nn.Linear(2, 2)
        model.register_buffer("passes", torch.zeros(()), persistent=False)

        def count(module: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
            module.passes += module.training
            return output + module.passes

        model.register_forward_hook(count)
        return model


class ShortAnswer(Points):
    def predict(self, output: Any) -> Any:
        return {"class": output.argmax(dim=1)[:0]}


class NoFeatures(Points):
    def decode_features(self, record: bytes) -> Any:
        raise SampleError("expected a target")


def test_a_good_task_passes_and_learns() -> None:
    report = check_task(Points(), RECORDS, refused=[b"", b"no json", b'{"x": [1], "y": 0}', b'{"x": [1, 2], "y": 2}'])
    assert (report.samples, report.parameters, len(report.reasons)) == (80, 6, 4)
    assert report.last_loss < report.first_loss
    assert report.reasons[3] == "expected a class 0 to 1, got 2"


def test_the_fast_path_is_there_afterwards() -> None:
    task = Points()
    check_task(task, RECORDS)
    assert vars(task) == {}
    assert task.decode_many(RECORDS) is not None


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (OtherBulk, r"the same x in bulk as one by one, .* compare decode_many\(\) with decode\(\)"),
        (TakesAll, r"expected b'no json' to be refused"),
        (Changing, "with the same seed gives another model"),
        (Frozen, "lower the mean loss over 80 samples, got 1 before and 1 after"),
        (Forgetful, r"a copy by state_dict\(\) gives another output"),
        (ShortAnswer, r"predict\(\): expected 'class' of 1 samples, got 0"),
        (NoFeatures, r"decode_features\(\): SampleError: expected a target"),
    ],
)
def test_a_bad_task_is_named(task: Callable[[], Task], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_task(task(), RECORDS, refused=[b"no json"])


def test_a_bad_record_among_the_good_ones_is_named() -> None:
    with pytest.raises(AssertionError, match=r"expected record 1 to be taken, it is refused: .*KeyError"):
        check_task(Points(), [RECORDS[0], b"{}", RECORDS[1]])


def test_shipped_tasks_pass() -> None:
    smurf = KDD.replace(b"tcp,http", b"icmp,ecr_i").replace(b"normal.", b"smurf.")
    assert check_task(Intrusion(), [KDD, smurf] * 20, refused=[b"", b"x" + KDD, b"nan" + KDD[1:]]).samples == 40
    blocks = [np.append(point, point.sum() > 0).astype("<f4").tobytes() for point in POINTS]
    assert check_task(Gaussian(2), blocks, refused=[bytes(16)], lr=0.5).samples == 80
