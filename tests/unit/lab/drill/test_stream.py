"""A poison record has the form of the job's records, and its task refuses it; an unknown form has no poison record."""

from __future__ import annotations

import pytest
from doll.config import parse
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.task.base import load_task

from doll_lab.drill.stream import poison_for

pytestmark = pytest.mark.slow  # loads torch

GAUSSIAN = (
    'task: {class: "examples.synthetic.task:Gaussian", args: {features: 4}}\n'
    "source: {kind: python, of: examples.synthetic.source:gaussians, args: {features: 4}}\n"
)
DIGITS = 'task: {class: "examples.digits.task:Digits"}\nsource: {kind: python, of: examples.digits.task:samples}\n'


@pytest.mark.parametrize("job", [GAUSSIAN, DIGITS])
@pytest.mark.parametrize("per_record", [1, 8])
def test_it_is_refused_as_a_whole(job: str, per_record: int) -> None:
    config = parse(f"job: a\n{job}data: {{batch_size: 8, samples_per_record: {per_record}}}\n")
    poison = poison_for(config, 1)
    assert poison is not None
    (record,) = poison.records
    assert poison.harmless == 0
    decoded = decode_records(
        load_task(config), RawRecords([5], [record]), samples_per_record=per_record, max_record_bytes=1_000_000
    )
    assert decoded.num_samples == 0
    assert [(item.offset, item.whole) for item in decoded.refused] == [(5, True)]


def test_there_is_none_where_nobody_knows_the_records_form() -> None:
    config = parse('job: a\ntask: {class: "a:B"}\nsource: {kind: jsonl, path: a.jsonl}\n')
    assert poison_for(config, 1) is None


@pytest.mark.parametrize("per_record", [1, 8])
def test_huge_features_are_decoded_and_one_class_at_most_is_right(per_record: int) -> None:
    config = parse(f"job: a\n{GAUSSIAN}data: {{batch_size: 8, samples_per_record: {per_record}}}\n")
    poison = poison_for(config, 2)
    assert poison is not None
    assert (len(poison.records), poison.harmless) == (2, 1)
    decoded = decode_records(
        load_task(config),
        RawRecords(range(len(poison.records)), poison.records),
        samples_per_record=per_record,
        max_record_bytes=1_000_000,
    )
    assert decoded.refused == []
    assert decoded.num_samples == 2 * per_record
    assert sorted(set(decoded.y.tolist())) == [0, 1]
