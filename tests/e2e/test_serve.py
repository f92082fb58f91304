"""`doll serve` beside a job whose processes and services are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.serve_fire import under_fire
from fuzzing import ALL_EXAMPLES

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("startable_broker")]


@pytest.mark.parametrize("has_tables", [False, True] if ALL_EXAMPLES else [True])
def test_no_answer_is_wrong_whatever_is_killed(tmp_path: Path, has_tables: bool) -> None:
    """Two kills of the parameter server, one of Redis, of Kafka, and of a serving process."""
    report = under_fire(tmp_path, requests=1000, swaps=30, limit_s=600.0, has_tables=has_tables)
    assert report.wrong == []
    assert report.errors == []
    assert report.unverified == 0
    assert (len(report.faults), report.requests >= 1000, report.swaps >= 30) == (5, True, True)
    assert report.refused == {}, "a version was there from the beginning"
