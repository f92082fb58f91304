"""What a server knows of its job from the records of its topics."""

from __future__ import annotations

import pytest
import record_builders
from doll.evaluation.stored_weights import Place
from doll.serving.job_facts import JobFacts
from statuses import server_status

pytestmark = pytest.mark.slow  # loads torch


def test_a_version_is_known_by_its_update() -> None:
    facts = JobFacts(10.0, now_s=0.0)
    facts.feed(record_builders.term_started(1), 0.0)
    facts.feed(record_builders.update(1, 1, time_s=100.0, samples_total=64), 0.0)
    made = facts.origin(Place(1, 1))
    assert made is not None
    assert (made.time_s, made.samples, facts.samples) == (100.0, 64, 64)
    assert facts.origin(Place(1, 2)) is None


def test_few_versions_are_remembered() -> None:
    facts = JobFacts(10.0, now_s=0.0)
    for version in range(1, 1500):
        facts.feed(record_builders.update(1, version, samples_total=version), 0.0)
    assert facts.origin(Place(1, 1)) is None
    assert facts.origin(Place(1, 1499)) is not None


def test_a_silent_server_is_noticed_and_the_end_of_the_job_is_no_silence() -> None:
    facts = JobFacts(10.0, now_s=0.0)
    assert facts.silence(9.0) == ""
    assert "silent for 11 s" in facts.silence(11.0)
    facts.feed(record_builders.update(1, 1), 11.0)
    assert facts.silence(12.0) == ""
    facts.feed(record_builders.finished(1, 1), 12.0)
    assert (facts.is_finished, facts.silence(1000.0)) == (True, "")
    facts.feed(record_builders.term_started(2, resumed=1), 1000.0)
    assert (facts.is_finished, facts.silence(1009.0)) == (False, "")


def test_a_server_that_was_replaced_says_nothing_new() -> None:
    facts = JobFacts(10.0, now_s=0.0)
    facts.feed(record_builders.update(2, 5, samples_total=50), 0.0)
    facts.feed(record_builders.update(1, 6, samples_total=60), 20.0)
    facts.feed(server_status(term=1, samples_total=70), 20.0)
    assert facts.samples == 50
    assert facts.origin(Place(1, 6)) is None
    assert facts.silence(20.0)
