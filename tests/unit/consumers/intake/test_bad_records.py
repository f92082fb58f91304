"""Five bad records of each kind in each format: all are dead letters that name the field, and nothing else is one."""

from __future__ import annotations

from typing import Any

import pytest
from doll.consumers.intake.decoding import RawRecords, decode_records
from format_tasks import EveryFormat, bad_records, good

pytestmark = pytest.mark.slow  # loads torch


class Envelope:
    def key(self) -> Any:
        return None

    def headers(self) -> Any:
        return None

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_800_000_000_000


@pytest.mark.parametrize("form", "JAPCB")
def test_every_bad_record_is_refused_by_the_name_of_its_field(form: str) -> None:
    """Those with bad headers do not come as far: `test_chunk_reader`."""
    bad = [
        item
        for item in bad_records()
        if item.header is None and item.value is not None and item.value[:1] == form.encode()
    ]
    assert len(bad) == {"J": 15, "A": 15, "P": 15, "C": 10, "B": 10}[form]
    values = [value for item in bad for value in (good(form), item.value, good(form, user=2))]
    records = RawRecords(range(len(values)), values, 0, [Envelope()] * len(values))
    decoded = decode_records(EveryFormat(), records, samples_per_record=1, max_record_bytes=10**6)
    reasons = {item.offset: item.reason for item in decoded.refused}
    assert sorted(reasons) == list(range(1, len(values), 3)), "these and no others"
    for offset, item in zip(sorted(reasons), bad, strict=True):
        assert item.reason in reasons[offset], (item.reason, reasons[offset])
    assert set(decoded.x["user"].tolist()) == {2**64 - 1 if form != "A" else 2**63 - 1, 2}
