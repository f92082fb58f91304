"""What a program gives as samples, as records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from doll.api.items import items_of
from doll.errors import ConfigError
from doll.task import pairs


@dataclasses.dataclass
class _Ride:
    km: float
    fare: float


class _Click(msgspec.Struct):
    user: int


class _Dataset:
    """As torch has them: indices, and a length."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, at: int) -> tuple[np.ndarray[Any, Any], int]:
        return np.full(2, at, np.float32), at


class _Frame:
    """The part of a DataFrame of pandas that is used."""

    columns = ("km",)

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def iloc(self) -> _Frame:
        return self

    def __getitem__(self, part: slice) -> _Frame:
        return _Frame(self._rows[part])

    def to_dict(self, kind: str) -> list[dict[str, Any]]:
        assert kind == "records"
        return self._rows


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ([b"a", bytearray(b"b")], [b"a", b"b"]),
        (["\u00e4", "b"], ["\u00e4".encode(), b"b"]),
        ([{"x": np.float32(0.5), "tags": np.array([1, 2])}], [b'{"x":0.5,"tags":[1,2]}']),
        ([_Ride(1.5, 7.0)], [b'{"km":1.5,"fare":7.0}']),
        ([_Click(2**60)], [b'{"user":1152921504606846976}']),
        ((line for line in ("a", "b")), [b"a", b"b"]),
    ],
)
def test_values_of_a_program_are_records(source: Any, expected: list[bytes]) -> None:
    items = items_of(source)
    assert list(items.records) == expected
    assert not items.are_pairs


def test_pairs_come_back_with_their_types_and_shapes() -> None:
    given = [(np.arange(6, dtype=np.float32).reshape(2, 3), 1), ([True, False], 0.5)]
    items = items_of(iter(given))
    assert items.are_pairs
    first, second = (tuple(map(np.asarray, pairs.decode(record)[:2])) for record in items.records)
    assert [(array.dtype, array.shape) for array in first] == [(np.float32, (2, 3)), (np.int64, ())]
    assert first[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (second[0].dtype, second[1].tolist()) == (np.bool_, 0.5)


def test_a_dataset_is_read_by_its_indices() -> None:
    labels = [np.asarray(pairs.decode(record).y).tolist() for record in items_of(_Dataset()).records]
    assert labels == [0, 1, 2]


class _Stream(_Dataset):
    """An IterableDataset of torch that knows its length: its indices are those of its base, which raises."""

    def __getitem__(self, at: int) -> tuple[np.ndarray[Any, Any], int]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
        return iter([_Dataset()[at] for at in range(3)])


class _Column(np.ndarray[Any, Any]):
    """The part of a Series that is used."""

    def to_numpy(self) -> np.ndarray[Any, Any]:
        return np.asarray(self)


X, Y = np.array([[0, 0], [1, 1], [2, 2]], np.float32), np.array([0, 1, 2])


@pytest.mark.parametrize("source", [_Stream(), (X, Y), [X, Y], (X, Y.view(_Column)), _Dataset()])
def test_arrays_and_datasets_give_a_pair_for_each_row(source: Any) -> None:
    items = items_of(source)
    assert items.are_pairs
    samples = [pairs.decode(record) for record in items.records]
    assert [(np.asarray(sample.x).tolist(), int(sample.y)) for sample in samples] == [([at, at], at) for at in range(3)]


class _Loader:
    """The part of a DataLoader of torch that is used."""

    batch_sampler: Any = "a BatchSampler"

    def __iter__(self) -> Iterator[Any]:
        return iter([(X, Y)])


def test_a_frame_gives_an_object_for_each_row() -> None:
    rows = [{"km": km} for km in range(5000)]
    assert [json.loads(record)["km"] for record in items_of(_Frame(rows)).records] == list(range(5000))


def test_records_are_made_when_they_are_asked_for() -> None:
    taken: list[int] = []

    def endless() -> Iterator[str]:
        while True:
            taken.append(1)
            yield "sample"

    records = items_of(endless()).records
    assert [next(records), next(records)] == [b"sample", b"sample"]
    assert len(taken) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((X, Y[:2]), "expected as many X as y, got 3 and 2"),
        (_Loader(), r"got a _Loader of batches: give its dataset, or DataLoader\(dataset, batch_size=None\)"),
        ({"x": X}, r"got one of 'x': give arrays as \(X, y\), and columns as a DataFrame"),
        (X, r"sample 0: it is ndarray"),
        ([], "expected at least one sample, got none"),
        (7, "expected an iterable of samples.*got int"),
        ("rows.csv", "expected an iterable of samples.*got str"),
        ([object()], "sample 0: it is object"),
        ([("a", 1)], "sample 0: x: expected numbers, got <U1"),
        ([(1, 2, 3)], "sample 0: it is tuple"),
        ([(np.array([object()]), 1)], "sample 0: x: expected numbers, got object"),
    ],
)
def test_what_cannot_be_sent_is_refused_at_once(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        items_of(source)
    with pytest.raises(ConfigError, match=rf"^held_out: .*{message}"):
        items_of(source, "held_out")


def test_a_later_sample_of_another_kind_is_named() -> None:
    records = items_of([{"x": 1}, "text"]).records
    assert next(records) == b'{"x":1}'
    with pytest.raises(ConfigError, match="sample 1: it is str"):
        next(records)
