"""Answers as records of a topic, with version and id of the request: to be joined with labels that come later.

It never holds a request up: while Kafka is away, answers that the producer's queue does not take are counted, and are
not logged.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from doll.config import JobConfig
from doll.kafka.publisher import Delivery, Publisher
from doll.services import Services
from doll.serving.model_copies import ServedVersion

_ANY_PARTITION: Final = -1  # by the key, as Kafka's clients do


class AnswerLog:
    """Sends to one topic, which exists; a context manager.

    Args:
        on_dropped: called for each answer that was not logged.
    """

    def __init__(
        self, config: JobConfig, services: Services, topic: str, model: str, on_dropped: Callable[[], object]
    ) -> None:  # fmt: skip
        self._publisher = Publisher(config, services)
        self._topic = topic
        self._model = model
        self._on_dropped = on_dropped

    def __enter__(self) -> AnswerLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self._publisher.close()

    def write(self, request_id: str, version: ServedVersion, answer: Any) -> None:
        """Log an answer.

        Args:
            answer: predictions, or outputs by name; what JSON can hold.
        """
        record = {
            "id": request_id, "time_s": time.time(), "model": self._model, "version": version.place.version,
            "term": version.place.term, "answer": answer,
        }  # fmt: skip
        value = msgspec.json.encode(record)
        is_queued = self._publisher.try_send(
            self._topic, value, partition=_ANY_PARTITION, key=request_id.encode(), on_delivery=self._delivered
        )  # fmt: skip
        if not is_queued:
            self._on_dropped()

    def _delivered(self, delivery: Delivery) -> None:
        if delivery.refusal:
            self._on_dropped()
