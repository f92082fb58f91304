"""Records that give several samples: in bulk as one by one, bounded, refused as a whole, and counted by offsets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from doll import JsonTask
from doll.consumers.intake.decoding import DecodedBatch, RawRecords, decode_records, refuse
from doll.records.packing import pack
from doll.task.base import Sample, Samples, Task
from doll.task.fields_task import Columns
from doll.task.records import Record
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.slow  # loads torch


class Basket(msgspec.Struct):
    shop: float
    prices: list[float]
    bought: bool = False


class Baskets(JsonTask):
    """A sample for each item: shop and price."""

    record = Basket
    input_shape = (2,)
    num_classes = 2
    max_samples_per_record = 5

    def samples(self, columns: Columns) -> Samples:
        prices = columns["prices"]
        counts = np.array([len(items) for items in prices], np.int64)
        x = np.stack([np.repeat(columns["shop"], counts), np.concatenate([*map(np.asarray, prices), []])], axis=1)
        return Samples(x, np.repeat(columns["bought"], counts), {"empty": counts == 0}, counts)


class OneByOne(Task):
    """The same without a call for many."""

    input_shape, num_classes = (2,), 2
    max_samples_per_record = 5

    def decode(self, record: bytes) -> list[Sample]:
        basket = msgspec.json.decode(record, type=Basket)
        return [Sample([basket.shop, price], int(basket.bought)) for price in basket.prices]


def decode(task: Task, values: Sequence[bytes], *, m: int = 1) -> DecodedBatch:
    return decode_records(
        task, RawRecords(range(100, 100 + len(values)), values), samples_per_record=m, max_record_bytes=9999
    )


def basket(shop: float, *prices: float, bought: bool = False) -> bytes:
    return json.dumps({"shop": shop, "prices": prices, "bought": bought}).encode()


BASKETS = [basket(1, 5, 6), basket(2), basket(3, 7, bought=True), basket(4, 1, 2, 3, 4, 5)]


@pytest.mark.parametrize("task", [Baskets(), OneByOne()])
def test_a_basket_gives_a_sample_for_each_item_in_order(task: Task) -> None:
    decoded = decode(task, BASKETS)
    assert decoded.x.tolist() == [[1, 5], [1, 6], [3, 7], [4, 1], [4, 2], [4, 3], [4, 4], [4, 5]]
    assert decoded.y.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert decoded.offsets.tolist() == [100, 100, 102, 103, 103, 103, 103, 103]
    assert decoded.refused == []
    assert decoded.skipped == (("empty" if isinstance(task, Baskets) else "no sample", 1),)


@pytest.mark.parametrize("task", [Baskets(), OneByOne()])
def test_a_record_with_more_than_may_be_is_refused(task: Task) -> None:
    decoded = decode(task, [*BASKETS, basket(5, *range(6)), basket(6, 1)])
    (letter,) = decoded.refused
    assert (letter.offset, letter.whole, letter.samples) == (104, True, 1)
    assert letter.reason == "gives 6 samples: expected at most 5 (max_samples_per_record of the task)"
    assert decoded.offsets.tolist()[-2:] == [103, 105]


@pytest.mark.parametrize("task", [Baskets(), OneByOne()])
def test_one_bad_sample_refuses_its_record_as_a_whole(task: Task) -> None:
    infinite = b'{"shop": 2, "prices": [1, 1e39, 3]}'  # of float64, and not of float32
    decoded = decode(task, [basket(1, 5, 6), infinite, basket(3, 7)])
    assert decoded.offsets.tolist() == [100, 100, 102]
    (letter,) = decoded.refused
    assert (letter.offset, letter.whole, letter.reason) == (101, True, "x holds NaN or infinity")


def test_packed_records_whose_values_give_several() -> None:
    decoded = decode(Baskets(), [pack([BASKETS[0], b"{}"]), pack([BASKETS[2], BASKETS[1]])], m=2)
    assert decoded.x.tolist() == [[1, 5], [1, 6], [3, 7]]
    assert decoded.offsets.tolist() == [100, 100, 101]
    assert [(letter.offset, letter.samples, letter.whole) for letter in decoded.refused] == [(100, 1, False)]
    assert decoded.skipped == (("empty", 1),)


def test_what_is_harmful_is_refused_by_record_and_counted() -> None:
    decoded = decode(Baskets(), BASKETS)
    refused = refuse(decoded, {1: "too long", 2: "too long"})
    assert [(item.offset, item.samples, item.whole, item.code) for item in refused] == [
        (100, 1, False, "harmful"), (102, 1, True, "harmful"),
    ]  # fmt: skip


class Keyed(Task):
    whole_records = True
    max_samples_per_record = 3

    def decode_record(self, record: Record) -> list[Sample]:
        return [Sample([float(n)], record.offset) for n in range(len(record.value))]


def test_records_with_their_offsets_too() -> None:
    decoded = decode(Keyed(), [b"ab", b"a", b"abcd"])
    assert decoded.y.tolist() == [100, 100, 101]
    assert [letter.offset for letter in decoded.refused] == [102]


def test_a_list_where_one_sample_is_expected_says_what_to_write() -> None:
    class Without(OneByOne):
        max_samples_per_record = 1

    decoded = decode(Without(), [basket(1, 5, 6), basket(1, 5)])
    assert decoded.offsets.tolist() == [101]
    assert decoded.refused[0].reason == "gives 2 samples: expected at most 1 (max_samples_per_record of the task)"


def test_a_pair_in_a_list_is_still_one_sample() -> None:
    class Pair(Task):
        def decode(self, record: bytes) -> Any:
            return [[float(len(record))], 1.0]

    assert decode(Pair(), [b"ab"]).x.tolist() == [[2.0]]


@pytest.mark.parametrize(
    "counts",
    [
        [2, 1, 1, 5], [2, 0, 1, 4], [2, 0, 1], [[2, 0, 1, 5]], [2.0, 0.0, 1.0, 5.0], [3, 0, 0, 5], [9, 0, -6, 5],
        [0, 2, 1, 5],
    ],
)  # fmt: skip
def test_counts_that_do_not_fit_are_not_believed(counts: list[Any]) -> None:
    """Then the call fails as any other, and each record is decoded by itself."""

    class Wrong(Baskets):
        def samples(self, columns: Columns) -> Samples:
            made = super().samples(columns)
            return made._replace(counts=np.array(counts)) if len(columns["shop"]) == 4 else made

    assert decode(Wrong(), BASKETS).x.tolist() == decode(Baskets(), BASKETS).x.tolist()


records = st.one_of(
    st.builds(basket, st.integers(0, 9), *[st.integers(0, 9)] * 2, bought=st.booleans()),
    st.lists(st.integers(0, 99), max_size=7).map(lambda prices: basket(1, *prices)),
    st.sampled_from([b"{}", b"", b'{"shop": 1, "prices": [1e39, 2]}', b'{"shop": 1, "prices": [null]}']),
)


@given(st.lists(records, max_size=40))
def test_bulk_and_one_by_one_agree(values: list[bytes]) -> None:
    bulk, single = decode(Baskets(), values), decode(OneByOne(), values)
    assert bulk.offsets.tolist() == single.offsets.tolist()
    assert bulk.x.tolist() == single.x.tolist()
    assert bulk.y.tolist() == single.y.tolist()
    assert [(item.offset, item.whole) for item in bulk.refused] == [
        (item.offset, item.whole) for item in single.refused
    ]
    assert sum(count for _, count in bulk.skipped) == sum(count for _, count in single.skipped)
    covered = {*bulk.offsets.tolist(), *(item.offset for item in bulk.refused)}
    assert len(covered) + sum(count for _, count in bulk.skipped) == len(values), "each record once"
