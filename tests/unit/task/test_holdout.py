"""Which records are held out: a function of the record and the job file, the same wherever it is computed."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from doll.config import parse
from doll.task.holdout import Split
from fake_message import FakeMessage as Message


def split_of(**more: Any) -> Split:
    sections: dict[str, Any] = {name: more.pop(name) for name in ("data", "freshness") if name in more}
    job = {"job": "j", "task": {"class": "a:B"}, "evaluation": {"holdout": more}, **sections}
    split = Split.of_job(parse(json.dumps(job)))
    assert split is not None
    return split


def held_out(
    split: Split, messages: list[Message], values: list[bytes | None] | None = None, **more: int
) -> list[bool]:
    first = more.get("first", 0)
    mask = split.held_out(
        more.get("partition", 0), range(first, first + len(messages)), values or [b"{}"] * len(messages), messages
    )
    assert mask.dtype == np.bool_
    return [bool(item) for item in mask]


def test_a_job_without_holdout_or_with_another_topic_learns_all_records() -> None:
    for evaluation in ({}, {"holdout": {"topic": "other"}}):
        assert Split.of_job(parse(json.dumps({"job": "j", "task": {"class": "a:B"}, "evaluation": evaluation}))) is None


def test_the_split_of_keys_is_part_of_the_format() -> None:
    """If this fails, jobs that exist would learn records that they have held out before."""
    messages = [Message(f"user {n}".encode()) for n in range(60)]
    mask = held_out(split_of(share=0.1), messages)
    assert [at for at, is_in in enumerate(mask) if is_in] == KEYS
    mask = held_out(split_of(share=0.1), [Message()] * 60, partition=2, first=1000)
    assert [at for at, is_in in enumerate(mask) if is_in] == OFFSETS


KEYS = [3, 22, 32, 40, 48, 49]
OFFSETS = [16, 52, 58, 59]


@pytest.mark.parametrize("share", [0.02, 0.5])
@pytest.mark.parametrize("has_keys", [True, False])
def test_the_share_is_that_of_the_job_file(share: float, has_keys: bool) -> None:
    mask = held_out(split_of(share=share), [Message(b"%d" % n if has_keys else None) for n in range(20_000)])
    assert abs(np.mean(mask) - share) < 5 * (share * (1 - share) / 20_000) ** 0.5


def test_all_records_of_a_key_have_the_same_fate_in_all_batches_and_partitions() -> None:
    rng, split = random.Random(3), split_of(share=0.3)
    fate: dict[bytes, bool] = {}
    for _ in range(50):
        keys = [b"%d" % rng.randrange(30) for _ in range(rng.randrange(1, 20))]
        mask = held_out(split, list(map(Message, keys)), partition=rng.randrange(5), first=rng.randrange(10**12))
        for key, is_in in zip(keys, mask, strict=True):
            assert fate.setdefault(key, is_in) is is_in
    assert set(fate.values()) == {False, True}


def test_records_without_a_key_are_divided_by_partition_and_offset() -> None:
    split, nothing = split_of(share=0.5), [Message(b"" if at % 2 else None) for at in range(200)]
    masks = [held_out(split, nothing, partition=partition) for partition in (0, 1)]
    assert masks[0] != masks[1]
    assert masks[0][50:] == held_out(split, nothing[50:], first=50), "whatever is read together"


def test_the_key_may_be_in_a_field_or_in_a_header() -> None:
    names = [f"u{n}" for n in range(100)]
    expected = held_out(split_of(share=0.5), [Message(name.encode()) for name in names])
    values: list[bytes | None] = [json.dumps({"x": [1], "user": name}).encode() for name in names]
    assert held_out(split_of(share=0.5, by={"field": "user"}), [Message(b"k")] * 100, values) == expected
    headers = [Message(b"k", [("user", b"other"), ("user", name.encode())]) for name in names]
    assert held_out(split_of(share=0.5, by={"header": "user"}), headers) == expected
    numbers: list[bytes | None] = [b'{"user": %d}' % n for n in range(100)]
    texts: list[bytes | None] = [b'{"user": "%d"}' % n for n in range(100)]
    by_field = split_of(share=0.5, by={"field": "user"})
    assert held_out(by_field, [Message()] * 100, numbers) == held_out(by_field, [Message()] * 100, texts)


@pytest.mark.parametrize(
    "value", [None, b"", b"not json", b"[1]", b'{"user": null}', b'{"user": 1.5}', b'{"other": 1}']
)
def test_what_has_no_usable_field_is_divided_by_offset(value: bytes | None) -> None:
    by_offset = held_out(split_of(share=0.5), [Message()] * 50)
    messages = [Message(b"k", header_list=ValueError("not UTF-8"))] * 50
    assert held_out(split_of(share=0.5, by={"field": "user"}), messages, [value] * 50) == by_offset
    assert held_out(split_of(share=0.5, by={"header": "user"}), messages) == by_offset


def test_records_that_cannot_be_read_are_not_held_out() -> None:
    split = split_of(share=0.999999)
    mask = split.held_out(0, [4, 5, 9], [b"{}", b"", b"{}"], [Message(b"a"), None, Message(b"b")])
    assert mask.tolist() == [True, False, True]
    assert split.held_out(0, [], [], []).tolist() == []


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"from": "2026-11-01T00:00:00Z", "until": "2026-11-02T00:00:00Z"}, [False, True, True, False, False]),
        ({"from": "2026-11-01T01:00:00+01:00"}, [False, True, True, True, False]),
        ({"until": "2026-11-02T00:00:00Z"}, [True, True, True, False, False]),
    ],
)
def test_a_time_slice_is_of_event_times(section: dict[str, str], expected: list[bool]) -> None:
    day_ms, begin_ms = 86_400_000, 1_793_491_200_000  # 1 November 2026
    times_ms = [begin_ms - 1, begin_ms, begin_ms + day_ms - 1, begin_ms + day_ms]
    split = split_of(**section)
    messages = [Message(stamp=(1, time_ms)) for time_ms in times_ms] + [Message()]
    assert held_out(split, messages) == expected, "a record without a time is learned"
    in_header = split_of(**section, freshness={"time": {"header": "at"}})
    messages = [Message(header_list=[("at", b"%d" % time_ms)]) for time_ms in times_ms] + [Message(header_list=[])]
    assert held_out(in_header, messages) == expected


def test_of_early_samples_only_corrections_are_scored() -> None:
    join = {
        "features": {"topic": "shown"}, "labels": [{"topic": "clicks", "name": "clicked"}], "window_s": 60,
        "early_after_s": 5, "confirm": True,
    }  # fmt: skip
    split = split_of(share=0.1, data={"join": join})
    values = [b'{"doll_is_correction": true}', b'{"doll_is_correction": false}', b"{}", b"", b"x", None]
    assert list(map(split.has_final_label, values)) == [True, False, False, False, False, False]
    assert all(map(split_of(share=0.1).has_final_label, values))
