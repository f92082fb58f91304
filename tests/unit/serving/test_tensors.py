"""What requests must hold, as the task's samples say it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import doll
import numpy as np
import pytest
from doll.errors import SampleError
from doll.serving.tensors import Signature, TensorInfo
from doll.task.base import Sample, Task
from doll.task.trees import Ragged


class Open(Task):
    """One array, of which its shape is known."""

    input_shape = (2,)


class Images(Task):
    input_shape = (2, 2)

    def holdout(self) -> Iterable[Sample]:
        return [Sample(np.zeros((2, 2), np.uint8), 3)]


class Visits(Task):
    """A tree, as `spec` says it."""

    def spec(self) -> Any:
        x = {"numbers": doll.Field("float32", (3,)), "words": (doll.Field("int64", (2,)), doll.Field("bool"))}
        return x, None


class Words(Task):
    """Samples of any length."""

    def holdout(self) -> Iterable[Sample]:
        return [Sample({"ids": np.array([1, 2, 3])}, {"label": 1})]

    def collate(self, samples: Any) -> Any:
        raise NotImplementedError


VISITS = {
    "numbers": np.ones((2, 3), np.float32), "words.0": np.array([[1, 2], [3, 4]]), "words.1": np.array([True, False])
}  # fmt: skip


def test_each_leaf_is_a_tensor_with_a_name() -> None:
    assert Signature(Visits()).inputs == (
        TensorInfo("numbers", "FP32", (-1, 3)),
        TensorInfo("words.0", "INT64", (-1, 2)),
        TensorInfo("words.1", "BOOL", (-1,)),
    )
    assert Signature(Open()).inputs == (TensorInfo("x", "FP32", (-1, 2)),)
    assert Signature(Images()).inputs == (TensorInfo("x", "UINT8", (-1, 2, 2)),)
    assert Signature(Words()).inputs == (TensorInfo("ids", "INT64", (-1, -1)),)
    assert Signature(Task()).inputs == (TensorInfo("x", "FP32", (-1, -1)),)


def test_a_tree_is_put_together() -> None:
    features = Signature(Visits()).of_tensors(VISITS)
    assert features.num_samples == 2
    assert features.x["words"][0].tolist() == [[1, 2], [3, 4]]
    assert features.x["words"][1].dtype == np.bool_


def test_requests_of_one_kind_are_one_batch() -> None:
    signature = Signature(Open())
    parts = [signature.of_tensors({"x": np.full((n, 2), n, np.float64)}) for n in (1, 2)]
    assert parts[0].kind == parts[1].kind
    assert signature.batch(parts).x.tolist() == [[1, 1], [2, 2], [2, 2]]
    assert signature.of_tensors({"x": np.ones((1, 2), np.int64)}).kind != parts[0].kind, "integers stay integers"


def test_samples_of_any_length_are_kept_apart_and_have_a_target_that_collate_can_look_at() -> None:
    signature = Signature(Words())
    one = signature.of_tensors({"ids": np.array([[1, 2]])})
    two = signature.of_records([{"ids": [1]}, {"ids": [4, 5, 6]}])
    assert one.kind == two.kind
    batch = signature.batch([one, two])
    assert isinstance(batch.x, Ragged)
    assert [item["ids"].tolist() for item in batch.x] == [[1, 2], [1], [4, 5, 6]]
    assert [item["label"].item() for item in batch.y] == [1, 1, 1]


@pytest.mark.parametrize(
    ("task", "tensors", "said"),
    [
        (Open(), {"y": np.ones((1, 2))}, "expected the inputs x, got y"),
        (Open(), {}, "expected the inputs x, got none"),
        (Open(), {"x": np.ones((1, 3))}, r"x: expected shape \(2,\) of a sample, got \(3,\)"),
        (Open(), {"x": np.float32(1)}, "expected samples, in a first dimension"),
        (Open(), {"x": np.ones((0, 2))}, "expected samples, in a first dimension"),
        (Open(), {"x": np.array([[np.nan, 1]])}, "x: expected finite numbers"),
        (Open(), {"x": np.array([[1e300, 1]])}, "x: expected finite numbers"),
        (Visits(), VISITS | {"numbers": np.ones((1, 3))}, "words.0: expected 1 samples, as in numbers"),
        (Visits(), VISITS | {"words.0": np.full((2, 2), 0.5)}, r'x\["words"\]\[0\]: expected int64'),
        (Visits(), VISITS | {"numbers": np.ones((2, 4))}, r'x\["numbers"\]: expected float32 of shape \(3,\)'),
        (Words(), {"ids": np.ones((1, 2, 2), np.int64)}, r'x\["ids"\]: expected int64'),
    ],
)
def test_what_does_not_fit_is_refused_by_name(task: Task, tensors: Any, said: str) -> None:
    arrays = {name: np.asarray(array) for name, array in tensors.items()}
    with pytest.raises(SampleError, match=said):
        Signature(task).of_tensors(arrays)


@pytest.mark.parametrize("x", [[1, 2, 3], {"a": [1, 2]}, [1, float("nan")], "text"])
def test_records_that_do_not_fit_are_refused(x: Any) -> None:
    with pytest.raises(SampleError):
        Signature(Open()).of_records([x])


def test_a_task_whose_held_out_samples_are_elsewhere_is_served() -> None:
    class Elsewhere(Open):
        def holdout(self) -> Iterable[Sample]:
            raise FileNotFoundError("no such file")

    signature = Signature(Elsewhere())
    assert signature.inputs == (TensorInfo("x", "FP32", (-1, 2)),)
    example = signature.example_features()
    assert example is not None
    assert example.x.tolist() == [[0, 0]]


class HashedIds(Task):
    def spec(self) -> Any:
        return {"id": doll.Field("uint64"), "n": doll.Field("int64")}, None


def test_ids_are_those_that_training_has_or_are_refused() -> None:
    """Of every type that a client may choose."""
    signature = Signature(HashedIds())
    big = np.array([2**64 - 1, 1], np.uint64)
    features = signature.of_tensors({"id": big, "n": np.array([123_456_789.0, 16_777_217.0])})
    assert [features.x[name].tolist() for name in ("id", "n")] == [[2**64 - 1, 1], [123_456_789, 16_777_217]]
    assert signature.of_records([{"id": 2**63, "n": 16_777_217.0}]).x["n"].tolist() == [16_777_217]
    for n in (big, np.array([2.0**63, 1]), np.array([2.0**53, 1]), np.array([2.0**24, 1], np.float32)):
        with pytest.raises(SampleError, match=r'x\["n"\]: expected int64'):
            signature.of_tensors({"id": big, "n": n})
    with pytest.raises(SampleError, match="x: expected integers below 2"):
        Signature(Open()).of_tensors({"x": big[None]})
    with pytest.raises(SampleError, match="x: expected integers in all of these samples, or in none"):
        Signature(Open()).of_records([[2**40 + 1, 1], [0.5, 1.5]])
