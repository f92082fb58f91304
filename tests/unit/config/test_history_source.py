"""Keys of `source.kind: history` that contradict each other are refused by their names."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from doll.config import parse
from doll.errors import ConfigError

GIVEN: dict[str, Any] = {
    "kind": "history", "table": "t", "topic": "clicks", "time": "at", "handover": {"partition": "p", "offset": "o"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"handover": {"partition": "p"}}, "expected partition and offset, or key and overlap_s; got partition"),
        ({"handover": {"partition": "p", "offset": "o", "key": "k"}}, "got key, offset, partition"),
        ({"handover": {"key": "k"}}, "got key"),
        ({"time": {"unit": "s"}}, "time: expected the name of a column"),
        ({"columns": ["x"], "value": "v"}, "expected columns or value, got both"),
        ({"columns": ["x", "x"]}, "expected different names"),
        ({"topic": "doll.j.samples"}, "source.topic: expected a topic that belongs to somebody else"),
        ({"topic": "a b"}, "source.topic"),
        ({"format": "orc"}, "source.format"),
    ],
)
def test_a_history_that_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    job = {"job": "j", "task": {"class": "m:C"}, "source": {**GIVEN, **changes}}
    with pytest.raises(ConfigError, match=reason):
        parse(yaml.safe_dump(job))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"samples_per_record": 2, "batch_size": 2}, "data.samples_per_record: expected 1 with source.kind: history"),
        ({"topic": "t"}, "source: expected none"),
        ({"format": {"kind": "csv", "columns": ["x"]}}, "data.format: expected .* source.value"),
    ],
)
def test_a_history_is_records_of_one_sample_in_the_own_topic(data: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(yaml.safe_dump({"job": "j", "task": {"class": "m:C"}, "source": GIVEN, "data": data}))
    parse(yaml.safe_dump({"job": "j", "task": {"class": "m:C"}, "source": {**GIVEN, "value": "v"}}))
