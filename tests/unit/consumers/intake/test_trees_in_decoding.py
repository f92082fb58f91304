"""Samples whose x and y are dicts, tuples and lists of arrays: one by one, in bulk, of any length, with weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import doll
import msgspec
import numpy as np
import pytest
from doll.consumers.intake.decoding import DecodedBatch, RawRecords, SeenForms, decode_records, refuse
from doll.errors import ConfigError
from doll.task import trees
from doll.task.base import Sample, Samples, Task
from doll.task.fields_task import Columns, JsonTask

DTYPES = {"age": np.float32, "ids": np.int32, "is_new": np.bool_, "small": np.float16}


def record(number: int, **others: Any) -> bytes:
    fields = {"age": number / 2, "ids": [number, 1], "is_new": number % 2 == 0, "clicked": number % 3, "paid": 0.5}
    return json.dumps(fields | others).encode()


class Visit(msgspec.Struct):
    age: float
    ids: list[int]
    is_new: bool
    clicked: int
    paid: float


class Nested(JsonTask):
    """x: {"user": {"age", "is_new"}, "item": (ids, small)}; y: {"clicked", "paid"}."""

    record = Visit

    def samples(self, columns: Columns) -> Any:
        x = {
            "user": {"is_new": columns["is_new"], "age": columns["age"]},
            "item": (columns["ids"].astype(np.int32), columns["age"].astype(np.float16)),
        }
        return x, {"paid": columns["paid"], "clicked": columns["clicked"]}


class OneByOne(Nested):
    decode_many = Task.decode_many  # type: ignore[assignment]


def decode(task: Task, values: Sequence[bytes], seen: SeenForms | None = None) -> DecodedBatch:
    records = RawRecords(range(100, 100 + len(values)), values)
    return decode_records(task, records, samples_per_record=1, max_record_bytes=100_000, seen=seen)


def types(tree: Any) -> list[np.dtype[Any]]:
    return [array.dtype for array in trees.arrays_of(tree)]


@pytest.mark.parametrize("task", [Nested(), OneByOne()], ids=["in bulk", "one by one"])
def test_every_array_keeps_its_type_and_its_place(task: Task) -> None:
    decoded = decode(task, [record(number) for number in range(40)])
    assert (decoded.num_samples, decoded.refused) == (40, [])
    assert decoded.x["user"]["age"].tolist() == [number / 2 for number in range(40)]
    assert decoded.x["item"][0].tolist() == [[number, 1] for number in range(40)]
    assert types(decoded.x) == [np.int32, np.float16, np.float32, np.bool_]  # item, user; age, is_new
    assert types(decoded.y) == [np.int64, np.float64]
    assert isinstance(decoded.x["item"], tuple)


def test_one_by_one_is_what_in_bulk_is_to_the_bit() -> None:
    values = [record(number) for number in range(40)]
    bulk, single = decode(Nested(), values), decode(OneByOne(), values)
    assert trees.flat(bulk.x)[1] == trees.flat(single.x)[1]
    assert trees.bytes_of(bulk.x) == trees.bytes_of(single.x)
    assert trees.bytes_of(bulk.y) == trees.bytes_of(single.y)


def test_a_bad_value_is_refused_by_the_name_of_its_field() -> None:
    values = [record(number) for number in range(20)]
    values[3], values[7], values[9] = record(3, age=1e39), record(7, ids=[1]), b"{"
    for task in (Nested(), OneByOne()):
        decoded = decode(task, values)
        assert decoded.num_samples == 17
        reasons = {item.offset: item.reason for item in decoded.refused}
        assert reasons[103] == 'x["item"][1] holds NaN or infinity'
        assert reasons[107] == 'x["item"][0]: expected shape (2,) as most of the batch, got (1,)'
        assert "truncated" in reasons[109]


def test_what_the_first_batch_has_holds_for_the_next_ones() -> None:
    task, values = OneByOne(), [record(number) for number in range(10)]
    seen = SeenForms(task)
    decode(task, values, seen)
    others = [record(1, ids=[1, 2, 3]) for _ in range(6)] + [record(2)]
    for other in (OneByOne(), Nested()):
        decoded = decode(other, others, seen)
        assert decoded.offsets.tolist() == [106]
        assert {item.reason for item in decoded.refused} == {
            'x["item"][0]: expected int32 of shape (2,), got int32 of shape (3,)'
        }


class Declared(OneByOne):
    def spec(self) -> Any:
        x = {
            "user": {"age": doll.Field("float32"), "is_new": doll.Field("bool")},
            "item": (doll.Field("int64", (2,)), doll.Field("float32")),
        }
        return x, {"paid": doll.Field("float64"), "clicked": doll.Field("int64")}


def test_a_declared_form_converts_what_keeps_its_value() -> None:
    decoded = decode(Declared(), [record(1), record(2, clicked=2), record(3)])
    assert types(decoded.x) == [np.int64, np.float32, np.float32, np.bool_]


def test_a_declared_form_refuses_by_name_from_the_first_sample_on() -> None:
    class Ages(Task):
        def spec(self) -> Any:
            return {"user": {"age": doll.Field("float32", (3,))}}, None

        def decode(self, record: bytes) -> Sample:
            return Sample({"user": {"age": json.loads(record)}}, 1)

    decoded = decode(Ages(), [b"[1, 2]", b"[1, 2, 3]", b'["a", "b", "c"]'])
    assert decoded.x["user"]["age"].tolist() == [[1.0, 2.0, 3.0]]
    assert [item.reason for item in decoded.refused] == [
        'x["user"]["age"]: expected float32 of shape (3,), got int64 of shape (2,)',
        'x["user"]["age"]: expected float32 of shape (3,), got <U1 of shape (3,)',
    ]


def test_another_structure_is_refused() -> None:
    class Changing(Task):
        def decode(self, record: bytes) -> Sample:
            return Sample(json.loads(record), 1)

    decoded = decode(Changing(), [b'{"a": 1, "b": [2, 3]}'] * 3 + [b'{"a": 1}', b'{"a": 1, "b": null}', b"{}"])
    assert decoded.num_samples == 3
    assert [item.reason for item in decoded.refused] == [
        'expected x["a"], x["b"] as most of the batch, got x["a"]',
        'expected numbers in x["b"], got mixed or ragged values',
        "expected an array in x, got {}",
    ]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (({"a": 3}, None), "expected doll.Field for each array of x"),
        (doll.Field(), "expected fields of x and of y"),
        ((doll.Field("text"), None), "x: expected a type of numpy, got 'text'"),
        (({"a": doll.Field("U3")}, None), r'x\["a"\]: expected a type of numbers or bool'),
    ],
)
def test_a_wrong_spec_is_refused_before_anything_is_decoded(spec: Any, says: str) -> None:
    class Wrong(Nested):
        def spec(self) -> Any:
            return spec

    with pytest.raises(ConfigError, match=says):
        SeenForms(Wrong())


def test_a_list_of_numbers_is_one_array_as_before() -> None:
    class Plain(Task):
        def decode(self, record: bytes) -> Sample:
            return Sample(json.loads(record), 1)

    decoded = decode(Plain(), [b"[1, 2]", b"[[3], [4]]", b"[5, 6]"])
    assert decoded.x.tolist() == [[1, 2], [5, 6]]
    assert decoded.refused[0].reason == "expected x (2,) and y () as most of the batch, got x (2, 1) and y ()"


# --- of any length ----------------------------------------------------------------------------------------------------


class Tokens(msgspec.Struct):
    tokens: list[int]
    label: int


class Texts(JsonTask):
    record = Tokens
    num_classes = 2

    def samples(self, columns: Columns) -> Any:
        return {"tokens": columns["tokens"]}, columns["label"]

    def collate(self, samples: Sequence[Sample]) -> Any:
        values, mask = doll.pad([sample.x["tokens"] for sample in samples])
        return {"tokens": values, "mask": mask}, np.array([sample.y for sample in samples])


class TextsOneByOne(Texts):
    decode_many = Task.decode_many  # type: ignore[assignment]


@pytest.mark.parametrize("task", [Texts(), TextsOneByOne()], ids=["in bulk", "one by one"])
def test_sequences_of_1_to_512_tokens_are_all_samples(task: Texts) -> None:
    lengths = np.random.default_rng(3).permutation(np.arange(1, 513))
    seen = SeenForms(task)
    for at in range(0, 512, 64):
        part = lengths[at : at + 64]
        values = [json.dumps({"tokens": list(range(length)), "label": int(length) % 2}).encode() for length in part]
        decoded = decode(task, values, seen)
        assert (decoded.num_samples, decoded.refused) == (64, [])
        assert isinstance(decoded.x, trees.Ragged)
        assert [len(sample["tokens"]) for sample in decoded.x] == part.tolist()
        assert {sample["tokens"].dtype for sample in decoded.x} == {np.dtype(np.int64)}


def test_a_sample_of_another_type_is_refused_among_sequences() -> None:
    values = [
        json.dumps({"tokens": [1] * length, "label": label}).encode() for length, label in [(3, 1), (5, 2), (1, 0)]
    ]
    decoded = decode(Texts(), values)
    assert decoded.offsets.tolist() == [100, 102]
    assert decoded.refused[0].reason == "expected a class 0 to 1, got 2"


def test_padding() -> None:
    values, mask = padded = doll.pad([[1, 2, 3], [4]], value=-1)
    assert values.tolist() == [[1, 2, 3], [4, -1, -1]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]
    assert padded.lengths.tolist() == [3, 1]
    assert doll.pad([np.ones((1, 2), np.float32)], length=4).values.shape == (1, 4, 2)
    with pytest.raises(ValueError, match="at most 2, got one of 3"):
        doll.pad([[1, 2, 3]], length=2)
    with pytest.raises(ValueError, match="that differ in the first"):
        doll.pad([[1], [[2]]])


# --- weights and groups -----------------------------------------------------------------------------------------------


class Weighted(Task):
    def decode(self, record: bytes) -> Sample:
        x, weight, group = json.loads(record)
        return Sample([x], 1.0, float(weight), group)


class WeightedInBulk(Weighted):
    def decode_many(self, values: Sequence[bytes]) -> Samples:
        x, weight, group = zip(*map(json.loads, values), strict=True)
        ones = np.ones(len(values))
        groups = np.array(group) if all(isinstance(item, int) for item in group) else np.array(group, object)
        return Samples(np.array(x)[:, None], ones, weight=np.array(weight, np.float64), group=groups)


@pytest.mark.parametrize("cls", [Weighted, WeightedInBulk])
def test_weights_and_groups_come_with_their_samples(cls: type[Task]) -> None:
    values = [json.dumps([number, number % 3, number // 4]).encode() for number in range(20)]
    decoded = decode(cls(), values)
    assert decoded.weight is not None
    assert decoded.group is not None
    assert decoded.weight.tolist() == [number % 3 for number in range(20)]
    assert decoded.group.tolist() == [number // 4 for number in range(20)]
    assert (decoded.weight.dtype, decoded.group.dtype) == (np.float32, np.int64)


@pytest.mark.parametrize("cls", [Weighted, WeightedInBulk])
def test_texts_are_groups_by_a_hash_that_is_the_same_everywhere(cls: type[Task]) -> None:
    decoded = decode(cls(), [b'[1, 1, "a"]', b'[2, 1, "b"]', b'[3, 1, "a"]'])
    assert decoded.weight is None, "all are 1"
    assert decoded.group is not None
    assert decoded.group.tolist() == [3405396810240292928, 8453121595177857668, 3405396810240292928]


@pytest.mark.parametrize("cls", [Weighted, WeightedInBulk])
def test_a_weight_below_0_or_not_finite_is_refused(cls: type[Task]) -> None:
    values = [b"[1, 1, 1]"] * 12 + [b"[1, -1, 1]", b"[1, Infinity, 1]", b"[1, NaN, 1]", b"[1, 0, 1]"]
    decoded = decode(cls(), values)
    assert decoded.num_samples == 13
    assert [item.reason for item in decoded.refused] == [
        f"weight: expected a finite number of 0 or more, got {text}" for text in ("-1.0", "inf", "nan")
    ]


def test_what_is_refused_later_leaves_the_others_with_their_weights() -> None:
    decoded = decode(Weighted(), [b"[1, 2, 7]", b"[2, 3, 8]", b"[3, 4, 9]"])
    assert [item.offset for item in refuse(decoded, {1: "bad"})] == [101]
    left = decoded.samples.take([0, 2])
    assert left.weight is not None
    assert (left.x.tolist(), left.weight.tolist(), left.total_weight) == ([[1], [3]], [2, 4], 6.0)
