"""Where records have their event time, and what does not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from doll.config import parse
from doll.errors import ConfigError


def job(**sections: Any) -> str:
    return json.dumps({"job": "j", "task": {"class": "a:B"}, **sections})


def test_a_text_is_the_name_of_a_field() -> None:
    config = parse(job(freshness={"time": "at", "event_to_served_s": 5}))
    assert config.freshness.time.field == "at"
    assert [config.freshness.limit_s(stage) for stage in ("learned", "durable", "served")] == [None, None, 5]


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"freshness": {"time": {"field": "at", "header": "at"}}}, "expected field or header, got both"),
        ({"freshness": {"time": {"unit": "minutes"}}}, "unit"),
        ({"freshness": {"share": 0}}, "share"),
        ({"freshness": {"time": "at"}, "data": {"samples_per_record": 4}}, "name a header"),
        ({"freshness": {"time": "at"}, "data": {"format": {"kind": "csv", "columns": ["a"]}}}, "name a header"),
    ],
)
def test_what_does_not_fit_is_refused(sections: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(job(**sections))


def test_packed_records_may_have_their_time_in_a_header() -> None:
    config = parse(job(freshness={"time": {"header": "at", "unit": "s"}}, data={"samples_per_record": 4}))
    assert config.freshness.time.header == "at"
