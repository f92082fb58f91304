"""Sends answers to a Kafka topic, with the version and the request id, so that they can be joined with later labels.

With `each_record`, the records of requests are written too, one by one: `data.join` of the same job, or of another one,
reads them as features, so that a model learns from what was served.

Logging never delays a request. While Kafka is unavailable, answers wait in the bounded queue of the producer. Answers
that do not fit the queue, or that Kafka rejects, are counted and dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from doll.config import JobConfig
from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.clients import kafka_problem
from doll.kafka.publisher import Delivery, Publisher
from doll.kafka.topic_plan import TOPIC_KINDS
from doll.services import Services
from doll.serving.model_copies import ServedVersion
from doll.telemetry import get_logger

log = get_logger(__name__)

SERVED_FIELD: Final = "doll_served"
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_ANY_PARTITION: Final = -1  # the client chooses the partition by the key
_POLL_S: Final = 0.2
_LOOK_S: Final = 2.0  # interval of looking for new addresses: a resumed run may have others
_REPEAT_S: Final = 30.0
_ANSWERS_S: Final = 5.0
# Limit of the producer's queue: the default of librdkafka is 1 GB.
_QUEUE: Final[dict[str, Any]] = {"queue_buffering_max_messages": 100_000, "queue_buffering_max_kbytes": 65_536}


class AnswerLog:
    """Sends answers to one existing topic; a context manager.

    Args:
        find_services: returns the job's current services; None if none are known.
        each_record: write one record for each record of a request: its fields, and the answer in `SERVED_FIELD`.
        on_logged: called for each answer that Kafka has acknowledged.
        on_dropped: called for each answer that was not logged.

    Raises:
        ConfigError: no address of Kafka is known, or Kafka reports at the start that the topic cannot be used.
    """

    def __init__(
        self, config: JobConfig, find_services: Callable[[], Services | None], topic: str, model: str, *,
        each_record: bool = False, on_logged: Callable[[], object], on_dropped: Callable[[], object],
    ) -> None:  # fmt: skip
        services = find_services()
        if services is None:
            raise ConfigError("--log-answers: expected kafka.address in the job file, or DOLL_KAFKA; got neither")
        _require_topic(config, services, topic)
        self._config = config
        self._find_services = find_services
        self._services = services
        self._topic = topic
        self._model = model
        self._each_record = each_record
        self._on_logged = on_logged
        self._on_dropped = on_dropped
        # Held during delivery reports: by the thread that answers requests and by the thread that polls.
        self._lock = threading.RLock()
        self._publisher = Publisher(config, services, **_QUEUE)
        self._said_s = float("-inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="answer-log", daemon=True)

    def __enter__(self) -> AnswerLog:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._publisher.close()
        self._publisher.discard()  # answers not acknowledged by now are counted as dropped

    def write(
        self, request_id: str, version: ServedVersion, answer: Any, records: Sequence[bytes] = (), *,
        probability: float = 1.0,
    ) -> None:  # fmt: skip
        """Log an answer.

        Args:
            answer: predictions, or outputs by name, as values that JSON can represent.
            records: the records of the request; none: it had tensors.
            probability: that with which this version was chosen for the request; 0: its user got another answer.
        """
        facts = {
            "id": request_id, "time_s": time.time(), "model": self._model, "version": version.place.version,
            "term": version.place.term, "probability": probability,
        }  # fmt: skip
        if not self._each_record:
            self._send(request_id, msgspec.json.encode({**facts, "answer": answer}))
        elif not records:
            self._drop("a request with tensors has no records to log: send records to /predict")
        for number, record in enumerate(records if self._each_record else ()):
            key = request_id if len(records) == 1 else f"{request_id}-{number}"
            try:
                fields = _decode_fields(record)
            except msgspec.MsgspecError:
                self._drop("a record that is no JSON object cannot be joined")
                continue
            self._send(
                key, msgspec.json.encode({**fields, SERVED_FIELD: {**facts, "id": key, "answer": answer[number]}})
            )

    def _send(self, key: str, value: bytes) -> None:
        with self._lock:
            is_queued = self._publisher.try_send(
                self._topic, value, partition=_ANY_PARTITION, key=key.encode(), on_delivery=self._delivered
            )  # fmt: skip
            if not is_queued:
                self._drop(f"Kafka at {self._services.kafka} has not taken what waits for it")

    def _delivered(self, delivery: Delivery) -> None:
        if delivery.refusal:
            self._drop(delivery.refusal)
        else:
            self._on_logged()

    def _drop(self, reason: str) -> None:
        self._on_dropped()
        if time.monotonic() - self._said_s >= _REPEAT_S:
            self._said_s = time.monotonic()
            log.warning("answer_not_logged", topic=self._topic, reason=reason)

    def _poll(self) -> None:
        """Report deliveries even if no requests arrive. If the Kafka address of the job changes, use the new one."""
        look_at_s = time.monotonic() + _LOOK_S
        while not self._stop.wait(_POLL_S):
            with self._lock:
                self._publisher.poll()
            if time.monotonic() >= look_at_s:
                look_at_s = time.monotonic() + _LOOK_S
                self._follow(self._find_services())

    def _follow(self, services: Services | None) -> None:
        if services is None or services.kafka == self._services.kafka:
            return
        try:
            publisher = Publisher(self._config, services, **_QUEUE)
        except ConfigError as exc:  # the environment lacks its credentials: keep the old Kafka
            log.warning("answer_log_not_moved", reason=str(exc))
            return
        with self._lock:
            before, self._publisher, self._services = self._publisher, publisher, services
            before.discard()


def _require_topic(config: JobConfig, services: Services, topic: str) -> None:
    """Check that the topic can be used.

    Raises:
        ConfigError: Kafka has no such topic, or the job itself reads it.
    """
    if topic in {config.topic(kind) for kind in TOPIC_KINDS}:
        raise ConfigError(
            f"--log-answers {topic}: expected a topic of its own, got one that the job uses: answers would be read as "
            "its records"
        )
    problem = kafka_problem(config, services, _ANSWERS_S)
    if problem is None:
        try:
            if topics.exists(config, services, topic):
                return
        except ServiceUnavailableError as exc:
            problem = str(exc)
    if problem is not None:
        log.warning("answers_wait", topic=topic, reason=problem, action="answers wait until Kafka takes them")
        return
    raise ConfigError(
        f"--log-answers {topic}: expected a topic that exists on Kafka at {services.kafka}, and may be written by this "
        "user: create it, or correct the name"
    )
