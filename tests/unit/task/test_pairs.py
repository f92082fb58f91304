"""Samples as records: what a program gives is what a task gets, whatever its structure."""

from __future__ import annotations

from typing import Any

import doll
import msgspec
import numpy as np
import pytest
from doll.api.items import items_of
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.errors import ConfigError, SampleError
from doll.task import pairs, trees
from doll.task.base import Sample, Samples, Task
from doll.task.batches import batch_of
from doll.task.forms import NO_GROUP
from doll.task.pairs import PairTask, decode, decode_many, encode, read_records, write_records

X: dict[str, Any] = {"b": [np.arange(3, dtype=np.int16), np.float32(0.5)], "a": (np.array([True, False]), {"c": 7})}


def test_every_structure_and_type_comes_back() -> None:
    sample = decode(encode(X, [np.float64(2), np.ones((2, 2))], 0.25, "query"))
    assert (sample.weight, sample.group) == (0.25, "query")
    assert isinstance(sample.x["a"], tuple)
    assert isinstance(sample.x["b"], list)
    (leaves, structure), (others, expected) = trees.flat(sample.x), trees.parts_of(X)
    assert structure == expected
    assert [leaf.tolist() for leaf in leaves] == [np.asarray(leaf).tolist() for leaf in others]
    assert [leaf.dtype for leaf in leaves] == [np.bool_, np.int64, np.int16, np.float32]


def test_a_pair_of_arrays_has_the_record_that_it_had_before() -> None:
    record = encode(np.ones(2, np.float32), 1)
    ones, one = np.ones(2, np.float32).tobytes(), np.int64(1).tobytes()
    assert record == msgspec.msgpack.encode([["<f4", [2], ones], ["<i8", [], one]])


def test_in_bulk_is_one_by_one() -> None:
    values = [encode({"a": np.full(2, at)}, at, weight=at, group=at) for at in range(5)]
    many = decode_many(values)
    assert isinstance(many, Samples)
    assert many.x["a"].tolist() == [[at, at] for at in range(5)]
    assert many.weight is not None
    assert many.group is not None
    assert (many.weight.tolist(), many.group.tolist()) == (list(range(5)), list(range(5)))
    assert decode_many([*values, encode(np.ones(2), 1)]) is None, "of another structure"
    ragged = [encode({"a": np.ones(at + 1)}, at) for at in range(5)]
    assert decode_many(ragged) is None
    assert decode_many(ragged, is_ragged=True) is not None


@pytest.mark.parametrize(
    "record",
    [b"", b"\x92", b"\x95\x90\x00\x00\x01\xc0", b"{}", encode(X, 1)[:-9], msgspec.msgpack.encode([[], 5, 0, 1.0, None]),
     msgspec.msgpack.encode([[["<f4", [9], b""]], 0, 0, 1.0, None])],
)  # fmt: skip
def test_what_is_no_sample_is_refused(record: bytes) -> None:
    with pytest.raises(SampleError, match="expected"):
        decode(record)
    decoded = decode_records(PairTask(), RawRecords([3], [record]), samples_per_record=1, max_record_bytes=10_000)
    assert [item.offset for item in decoded.refused] == [3]


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r'x\["a"\]: expected numbers'):
        encode({"a": "text"}, 1)
    with pytest.raises(TypeError, match="expected texts as the keys"):
        encode({1: np.ones(2)}, 1)
    with pytest.raises(SampleError, match="weight: expected a finite number"):
        encode(1.0, 1, weight=-1.0)


def test_a_source_may_give_dicts_in_pairs_and_whole_samples(tmp_path: Any) -> None:
    items = items_of([({"a": 1.0, "b": np.arange(2)}, 1), doll.Sample({"a": 2.0, "b": np.arange(2)}, 0, 3.0, 9)])
    assert items.are_pairs
    first, second = map(pairs.decode, items.records)
    assert (first.x["a"].tolist(), first.weight, first.group) == (1.0, 1.0, None)
    assert (second.x["b"].tolist(), second.weight, second.group) == ([0, 1], 3.0, 9)
    with pytest.raises(ConfigError, match="weight: expected a finite"):
        items_of([Sample(1.0, 1, -2.0)])
    write_records(tmp_path / "held", [encode(X, 1), encode(*Sample(X, 0, 2.0))])
    assert [decode(record).weight for record in read_records(tmp_path / "held")] == [1.0, 2.0]


def test_a_group_of_any_number_is_a_group_and_samples_without_one_have_an_id_that_none_has() -> None:
    numbers: list[Any] = [-1, None, np.int64(0), 2**63 - 1, None, -(2**63) + 1]
    ids = [NO_GROUP if number is None else number for number in numbers]
    records = [encode(1.0, 1, 2.0, group=number) for number in numbers]
    bulk = decode_many(records)
    assert isinstance(bulk, Samples)
    assert bulk.group is not None
    single = batch_of(PairTask(), map(decode, records))
    assert single.group is not None
    assert (bulk.group.tolist(), single.group.tolist()) == (ids, ids)
    only = batch_of(PairTask(), [Sample(1.0, 1, 1.0, -1)]).group
    assert only is not None, "a batch whose only group is -1 has lost it"
    for wrong in (NO_GROUP, 2**63, True, 1.5):
        with pytest.raises(SampleError, match=r"group: expected an integer of 64 bits above -2\*\*63, or a text"):
            encode(1.0, 1, group=wrong)  # type: ignore[arg-type]


def test_torch_tensors_in_a_dict_are_sent_as_arrays() -> None:
    class Tensor:  # as torch's, which fast tests do not load
        ndim = 1

        def detach(self) -> Any:
            return self

        cpu = detach

        def numpy(self) -> Any:
            return np.arange(2.0)

    assert decode(encode([Tensor(), Tensor()], 1)).x[1].tolist() == [0.0, 1.0]


def test_rows_of_pandas_are_dicts_of_fields() -> None:
    pandas = pytest.importorskip("pandas")
    items = items_of(pandas.DataFrame({"a": [1, 2], "b": [0.5, 1.5]}))
    assert (items.are_pairs, list(items.records)) == (False, [b'{"a":1,"b":0.5}', b'{"a":2,"b":1.5}'])


def test_a_task_without_collate_says_so() -> None:
    assert not Task().is_ragged
    with pytest.raises(NotImplementedError, match=r"Task does not define collate\(samples\)"):
        Task().collate([])


def test_an_integer_beside_a_fraction_is_refused_by_name_before_it_is_rounded() -> None:
    with pytest.raises(
        SampleError, match=rf"x: expected numbers that float32 holds, got the integer {2**40 + 1} beside"
    ):
        encode((2**40 + 1, 3.5), 0)
    with pytest.raises(SampleError, match=r'y\["a"\]: expected numbers that float64 holds'):
        encode(1, {"a": [2**53 + 1, 0.5], "b": np.ones(2)})
    assert decode(encode([2**63 + 1, 1], 0)).x.tolist() == [2**63 + 1, 1], "numpy makes floats of these"
    with pytest.raises(ConfigError, match="sample 1: x: expected numbers"):
        list(items_of([((1, 3.5), 0), ((2**40 + 1, 3.5), 0)]).records)
