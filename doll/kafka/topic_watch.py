"""Watch the samples topic while a job learns from it.

If partitions are added to the topic, the server gets the new number. The owner of a foreign topic may also delete it,
create it again, have it compacted or withdraw the permission, and brokers may fail. If the job's offsets then mean
other records, or records are lost before they are learned, the server saves a checkpoint and ends. Temporary problems
are logged once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from confluent_kafka.admin import AdminClient

from doll.config import JobConfig
from doll.errors import ConfigError, DollError, ServiceUnavailableError
from doll.kafka import foreign_topic
from doll.kafka.clients import make_admin
from doll.kafka.foreign_topic import ForeignTopic, MissingTopicError
from doll.kafka.samples_topic import TRUNCATED_ADVICE, ReplacedSamplesError, replaced_topic
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

EVERY_S: Final = 5.0
_LOOKS: Final = 2  # checks in a row without the topic, which a broker may not know just after its start


class TopicWatch:
    """A watch that checks the topic of one job regularly after it is started.

    Attributes:
        problem: reason why the job cannot continue; None if it can.

    Args:
        expected_id: Kafka's id of the topic that the model is learned from.
        on_problem: function that a thread of the watch calls once, with the problem.
        on_partitions: function that this thread calls after each check, with the number of partitions.
    """

    def __init__(
        self, config: JobConfig, services: Services, expected_id: str, on_problem: Callable[[], object],
        on_partitions: Callable[[int], object], *, every_s: float = EVERY_S,
    ) -> None:  # fmt: skip
        self.problem: DollError | None = None
        self._config, self._services = config, services
        self._expected_id = expected_id
        self._on_problem = on_problem
        self._on_partitions = on_partitions
        self._is_own = config.data.topic is None  # the readers of the topic detect its other problems
        self._every_s = every_s
        self._admin: AdminClient | None = None
        self._missed = 0
        self._said: dict[str, str] = {}
        self._closed = threading.Event()

    def start(self) -> None:
        """Check every few seconds, in a separate thread. Call this once."""
        threading.Thread(target=self._run, name="topic-watch", daemon=True).start()

    def close(self) -> None:
        """End the watch, without waiting for a check in progress."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            self.problem = self.look()
            if self.problem is not None:
                self._on_problem()
                return

    def look(self) -> DollError | None:
        """Check once, and return why the job cannot continue; None if it can."""
        try:
            if self._admin is None:
                self._admin = make_admin(self._config, self._services)
            topic = foreign_topic.look_up(self._config, self._services, admin=self._admin)
        except MissingTopicError:
            self._missed += 1
            name = self._config.topic("samples")
            what = f"topic {name} was deleted while the job was learning from it; {TRUNCATED_ADVICE}"
            return ReplacedSamplesError(what) if self._missed >= _LOOKS and not self._is_own else None
        except ServiceUnavailableError:  # the clients have logged the error
            return None
        except ConfigError as exc:  # the owner may grant the permission again
            if not self._is_own:
                self._say("permission", str(exc))
            return None
        self._missed = 0
        return self._judge(topic)

    def _judge(self, topic: ForeignTopic) -> DollError | None:
        if replaced := replaced_topic(topic.name, self._expected_id, topic.topic_id):
            return None if self._is_own else ReplacedSamplesError(f"{replaced}; {TRUNCATED_ADVICE}")
        self._on_partitions(topic.partitions)
        if self._is_own:
            return None
        if problem := foreign_topic.compacted(self._config, topic):
            return ConfigError(f"{problem}. Then go on with the job: nothing is lost that was not removed already")
        self._say("permission", foreign_topic.unreadable(self._config, self._services, topic))
        self._say("leader", foreign_topic.without_leader(topic))
        return None

    def _say(self, kind: str, problem: str) -> None:
        """Log a problem when it begins, and when it has ended."""
        before = self._said.get(kind, "")
        self._said[kind] = problem
        if problem and problem != before:
            log.warning("samples_topic", problem=problem)
        elif before and not problem:
            log.info("samples_topic_is_back", was=before)
