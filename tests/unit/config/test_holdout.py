"""The records that a job holds out, as the job file names them; a job that exists cannot change them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from doll.config import dump, parse
from doll.config.fingerprint import job_fields, resume_refusal
from doll.config.holdout import HashedKeyConfig
from doll.errors import ConfigError
from doll.kafka.permissions import Permission, needed

JOIN = {
    "features": {"topic": "shown"}, "labels": [{"topic": "clicks", "name": "clicked"}], "window_s": 60,
    "early_after_s": 5,
}  # fmt: skip


def job(holdout: Any, **sections: Any) -> str:
    evaluation = {"holdout": holdout, **sections.pop("evaluation", {})}
    return json.dumps({"job": "j", "task": {"class": "a:B"}, "evaluation": evaluation, **sections})


def test_what_is_hashed() -> None:
    for by, expected in (("key", HashedKeyConfig()), ({"field": "user"}, HashedKeyConfig(field="user"))):
        config = parse(job({"share": 0.02, "by": by}))
        assert config.evaluation.holdout is not None
        assert config.evaluation.holdout.by == expected
        assert parse(dump(config)) == config
    times = parse(job({"from": "2026-11-01T00:00:00Z", "until": "2026-11-02T00:00:00+02:00"}))
    assert parse(dump(times)) == times


@pytest.mark.parametrize(
    ("holdout", "sections", "reason"),
    [
        ({}, {}, "expected one of share, from and until, and topic"),
        ({"share": 0.1, "topic": "t"}, {}, "expected one of share"),
        ({"share": 0.1, "from": "2026-11-01T00:00:00Z"}, {}, "expected one of share"),
        ({"share": 0}, {}, "share"),
        ({"share": 1}, {}, "share"),
        ({"share": 0.1, "by": "user"}, {}, r"expected key, \{field: NAME\} or \{header: NAME\}, got 'user'"),
        ({"share": 0.1, "by": {"field": "a", "header": "b"}}, {}, "expected field or header, got both"),
        ({"from": "2026-11-01T00:00:00"}, {}, "from"),
        ({"from": "2026-11-01T00:00:00Z", "until": "2026-11-01T00:00:00Z"}, {}, "expected a time after `from`"),
        ({"topic": "doll.j.samples"}, {}, "a topic whose records the job does not learn"),
        ({"topic": "t"}, {"data": {"topic": "t", "partitions": 2}}, "a topic whose records the job does not learn"),
        ({"topic": "t"}, {"data": {"samples_per_record": 4}}, "samples_per_record"),
        ({"share": 0.1, "by": {"field": "user"}}, {"data": {"samples_per_record": 4}}, "name a header"),
        ({"share": 0.1}, {"data": {"join": JOIN}}, "data.join.confirm"),
    ],
)
def test_what_does_not_fit_is_refused(holdout: dict[str, Any], sections: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(job(holdout, **sections))


def fields(holdout: Any, **sections: Any) -> dict[str, str]:
    return job_fields(parse(job(holdout, **sections)))


def test_a_job_with_history_keeps_what_it_holds_out() -> None:
    plain, share = fields(None), fields({"share": 0.02})
    assert not any(key.startswith("evaluation.") for key in plain)
    assert plain == fields({"topic": "t"}), "the job learns the same records"
    refusal = resume_refusal(plain, share)
    assert refusal.startswith("evaluation.holdout.share: expected nothing, got 0.02, evaluation.holdout.by: ")
    assert "a run cannot be resumed with these changes" in refusal
    assert "doll regrid" not in refusal
    for other in ({"share": 0.03}, {"share": 0.02, "by": {"header": "u"}}, None):
        assert resume_refusal(share, fields(other))
    slices = fields({"from": "2026-11-01T00:00:00Z"})
    assert resume_refusal(slices, fields({"from": "2026-11-01T00:00:01Z"}))
    assert "freshness.time" in resume_refusal(
        slices, fields({"from": "2026-11-01T00:00:00Z"}, freshness={"time": "at"})
    )


def test_the_evaluator_may_read_the_topic() -> None:
    wanted = Permission("topic", "held", "Read")
    config = parse(job({"topic": "held"}))
    assert wanted in needed(config, "evaluator")
    assert wanted not in needed(config, "worker")
