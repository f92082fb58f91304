"""What of a foreign topic ends a job, and what is waited for. Without Kafka: what it says is given."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest
from doll.config import JobConfig
from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka import foreign_topic, topic_watch
from doll.kafka.foreign_topic import ForeignTopic, MissingTopicError
from doll.kafka.samples_topic import ReplacedSamplesError
from doll.kafka.topic_watch import TopicWatch
from doll.services import Services
from job_files import job
from waiting import WAIT_TIMEOUT_S

CONFIG = job("data.topic=clicks", "data.partitions=2", workers=2)
SOUND = ForeignTopic("clicks", 2, "first", may_read=True, settings={"cleanup.policy": "delete"})


class Kafka:
    """Says what was put into `answers`, then that the topic is sound."""

    def __init__(self) -> None:
        self.answers: list[ForeignTopic | Exception] = []

    def look_up(self, *args: object, **more: object) -> ForeignTopic:
        answer = self.answers.pop(0) if self.answers else SOUND
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Kafka:
    kafka = Kafka()
    monkeypatch.setattr(foreign_topic, "look_up", kafka.look_up)
    return kafka


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []

    class Log:
        def warning(self, event: str, **fields: Any) -> None:
            lines.append(fields["problem"])

        def info(self, event: str, **fields: Any) -> None:
            lines.append(event)

    monkeypatch.setattr(topic_watch, "log", Log())
    return lines


def watch(
    on_problem: Any = lambda: None, on_partitions: Any = lambda count: None, *, every_s: float = 1.0,
    config: JobConfig = CONFIG,
) -> TopicWatch:  # fmt: skip
    services = Services("nowhere:9092", "")
    return TopicWatch(config, services, "first", on_problem, on_partitions, every_s=every_s)


def test_a_topic_that_is_away_twice_was_deleted(kafka: Kafka) -> None:
    away, it = MissingTopicError("away"), watch()
    kafka.answers = [away, SOUND, away, ServiceUnavailableError("Kafka is away"), away]
    assert [it.look() for _ in range(4)] == [None] * 4
    problem = it.look()
    assert isinstance(problem, ReplacedSamplesError)
    assert "topic clicks was deleted while the job was learning from it" in str(problem)


def test_another_id_is_another_topic(kafka: Kafka) -> None:
    kafka.answers = [ForeignTopic("clicks", 2, "second")]
    problem = watch().look()
    assert isinstance(problem, ReplacedSamplesError)
    assert "expected Kafka's topic id first, found second" in str(problem)


def test_compaction_ends_the_job(kafka: Kafka) -> None:
    kafka.answers = [ForeignTopic("clicks", 2, "first", settings={"cleanup.policy": "compact"})]
    problem = watch().look()
    assert isinstance(problem, ConfigError)
    assert "cleanup.policy is compact, expected delete" in str(problem)


def test_what_passes_is_said_when_it_begins_and_when_it_ends(kafka: Kafka, logged: list[str]) -> None:
    leaderless = ForeignTopic("clicks", 2, "first", leaderless=((1, (4,)),))
    kafka.answers = [
        leaderless, leaderless, SOUND, ConfigError("not allowed"), ForeignTopic("clicks", 2, "first", may_read=False),
        SOUND,
    ]  # fmt: skip
    it = watch()
    assert [it.look() for _ in range(6)] == [None] * 6
    starts = ("topic clicks: no leader for partition 1", "samples_topic_is_back", "not allowed")
    more = (
        "Kafka at nowhere:9092 does not allow User:ANONYMOUS to read",
        "samples_topic_is_back",
    )
    assert len(logged) == 5
    assert all(line.startswith(start) for line, start in zip(logged, (*starts, *more), strict=True))


def test_the_number_of_partitions_is_told_of_the_topic_that_the_job_learns_from(kafka: Kafka) -> None:
    counts: list[int] = []
    kafka.answers = [SOUND, ForeignTopic("clicks", 3, "first"), ServiceUnavailableError("away"), SOUND]
    it = watch(on_partitions=counts.append)
    assert [it.look() for _ in range(4)] == [None] * 4
    assert counts == [2, 3, 2]
    kafka.answers = [ForeignTopic("clicks", 4, "second")]
    assert it.look() is not None
    assert counts == [2, 3, 2]


def test_of_its_own_topic_a_job_is_told_nothing_else(kafka: Kafka, logged: list[str]) -> None:
    """What happens to it is found by those who read it."""
    counts: list[int] = []
    away = MissingTopicError("away")
    kafka.answers = [
        ForeignTopic("doll.unit.samples", 3, "first", leaderless=((1, (4,)),)), ConfigError("not allowed"), away, away,
        ForeignTopic("doll.unit.samples", 5, "second", settings={"cleanup.policy": "compact"}),
    ]  # fmt: skip
    it = watch(on_partitions=counts.append, config=job(workers=2))
    assert [it.look() for _ in range(5)] == [None] * 5
    assert (counts, logged) == ([3], [])


def test_its_thread_tells_of_the_problem_once(kafka: Kafka) -> None:
    said = Event()
    kafka.answers = [SOUND, ForeignTopic("clicks", 2, "second")]
    it = watch(said.set, every_s=0.001)
    assert it.problem is None
    it.start()
    assert said.wait(WAIT_TIMEOUT_S)
    assert isinstance(it.problem, ReplacedSamplesError)
    it.close()
