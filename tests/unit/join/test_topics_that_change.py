"""A joiner looks at its topics now and then: at their ids, and not whether Kafka answers."""

from __future__ import annotations

from typing import Any

import pytest
from doll.errors import DataLossError, ServiceUnavailableError
from doll.join import main
from doll.kafka.joined_topics import JoinedTopic


def session() -> Any:
    made: Any = object.__new__(main._Session)
    made._config = made._services = None
    made._ids = {"clicks": "a"}
    return made


def test_a_kafka_that_does_not_answer_ends_no_joiner(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def away(*args: object) -> tuple[JoinedTopic, ...]:
        calls.append(1)
        raise ServiceUnavailableError("a partition has no leader")

    monkeypatch.setattr(main, "joined_topics", away)
    session()._check_topics()
    assert calls == [1]


@pytest.mark.parametrize("topic_id", ["a", "", "b"])
def test_a_topic_that_was_made_again_ends_the_joiner(topic_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "joined_topics", lambda *args: (JoinedTopic(1, "clicks", 1, topic_id),))
    if topic_id == "b":
        with pytest.raises(DataLossError, match="was deleted and created again"):
            session()._check_topics()
    else:  # the same, or a Kafka without ids
        session()._check_topics()
