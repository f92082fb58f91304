"""A poison record has the form of the job's records, and its task refuses it; there is none where nobody knows it."""

from __future__ import annotations

import pytest
from doll.config import parse
from doll.consumers.decoding import decode_records
from doll.drill.stream import poison_for
from doll.task import load_task

GAUSSIAN = (
    'task: {class: "doll.tasks.synthetic:Gaussian", args: {features: 4}}\nsource: {kind: synthetic, features: 4}\n'
)
DIGITS = 'task: {class: "doll.tasks.digits:Digits"}\nsource: {kind: digits}\n'


@pytest.mark.parametrize("job", [GAUSSIAN, DIGITS])
@pytest.mark.parametrize("per_record", [1, 8])
def test_it_is_refused_as_a_whole(job: str, per_record: int) -> None:
    config = parse(f"job: a\n{job}data: {{batch_size: 8, samples_per_record: {per_record}}}\n")
    record = poison_for(config)
    decoded = decode_records(
        load_task(config), [(5, record)], samples_per_record=per_record, max_record_bytes=1_000_000
    )
    assert decoded.num_samples == 0
    assert [(item.offset, item.whole) for item in decoded.refused] == [(5, True)]


def test_there_is_none_where_nobody_knows_the_records_form() -> None:
    config = parse('job: a\ntask: {class: "a:B"}\nsource: {kind: jsonl, path: a.jsonl}\n')
    assert poison_for(config) is None
