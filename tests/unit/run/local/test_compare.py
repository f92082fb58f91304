"""What can be compared, and the jobs that the runs of a comparison are."""

from __future__ import annotations

from pathlib import Path

import pytest
from doll.config import parse
from doll.config.job import JOB_NAME
from doll.errors import ConfigError
from doll.run.local.compare import check_comparable, own_job

JOB = """
job: line
task: {class: 'my_task.py:MyTask'}
data: {workers: 2, batch_size: 8}
source: {kind: python, of: examples.synthetic.source:gaussians}
stop: {samples: 300}
"""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["source=null"], "source: expected one that can be sent again to each policy, got none"),
        (["source={kind: stdin}"], "got stdin; write the events to a file"),
        (["stop={loss: 0.1}"], "stop: expected a limit that every policy reaches"),
        (["stop={}"], "as in --set stop.samples=20000"),
    ],
)
def test_a_stream_that_cannot_be_sent_again_or_has_no_end_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_comparable(parse(JOB, overrides))


@pytest.mark.parametrize("limit", ["samples", "updates", "seconds"])
def test_each_limit_is_one(limit: str) -> None:
    check_comparable(parse(JOB, [f"stop={{loss: 0.1, {limit}: 10}}"]))


def test_each_run_has_a_name_and_checkpoints_of_its_own() -> None:
    config = parse(JOB, ["checkpoint.folder=s3://bucket/shared"])
    first = Path("runs/line-compare-20260101-120000")
    names = {
        own_job(config, policy, number, folder).job
        for number, policy in enumerate(("doll", "doll", "bsp"), 1)
        for folder in (first, Path(f"{first}-2"))
    }
    assert len(names) == 6
    assert "line-1-doll-20260101-120000" in names
    assert own_job(config, "doll", 1, first).checkpoint.folder is None


def test_the_longest_names_make_a_name_that_is_allowed() -> None:
    config = parse(JOB.replace("line", "l_" * 31))
    folder = Path(f"{config.job}-compare-20260101-120000-12")
    assert JOB_NAME.fullmatch(own_job(config, "their_very_own_policy_of_a_long_name", 12, folder).job)
