"""The evaluator's process: Kafka and Redis in, `Evaluated` and metrics out, until the job has ended."""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doll import telemetry
from doll.kafka.clients import kafka_settings
from doll.kafka.tail import Tail
from doll.process.health import Heartbeat, heartbeat_of
from doll.process.heartbeats import HEARTBEAT_EVERY_S
from doll.process.signals import stop_requested
from doll.records import AnyRecord, Evaluated, Metric, encode
from doll.services import Services

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.evaluation.evaluator import Evaluation, Evaluator

log = telemetry.get_logger(__name__)

NICENESS = 10  # measuring must not slow learning down
POLL_S = 0.2
FLUSH_S = 10.0
CHECK_KAFKA_EVERY_S = 5.0
MAX_EVALUATION_S = 300.0  # one round over a large held-out set, on a machine whose workers come first
# A job that finished before this process started may be about to go on: a new parameter server says so within seconds,
# a standby after its lease too.
RESUME_GRACE_S = 30.0


def run_evaluator(config: JobConfig, services: Services, run_folder: Path, *, after_term: int = 0) -> int:
    """Evaluate until the job has finished or SIGTERM comes; 0.

    Needs the main thread: it takes over SIGTERM and SIGINT while it runs.

    Args:
        after_term: terms up to this one are of earlier runs: neither their models nor their end are this job's.

    Raises:
        ConfigError: the task cannot be used.
        ServiceUnavailableError: Kafka does not answer at the start. Later it is waited for, as Redis always is.
    """
    with suppress(OSError):
        os.nice(NICENESS)
    with stop_requested() as stop, heartbeat_of("evaluator", config) as heartbeat:
        return _run(config, services, run_folder, stop, heartbeat, after_term)


def _run(
    config: JobConfig,
    services: Services,
    run_folder: Path,
    stop: threading.Event,
    heartbeat: Heartbeat,
    after_term: int,
) -> int:
    import torch
    from confluent_kafka import Producer

    from doll.evaluation.evaluator import Evaluator
    from doll.storage.stores import open_blobs

    torch.set_num_threads(1)
    # One failed call ends a round of evaluation, it does not hold up the updates.
    blobs = open_blobs(config, services, give_up=lambda: True, timeout_s=5.0)
    producer = Producer(kafka_settings(config, services, acks="all", linger_ms=5))
    try:
        evaluator = Evaluator(config, blobs, _checkpoint_reader(config, run_folder), run_folder, after_term=after_term)
        with Tail(config, services, (config.topic("updates"),)) as tail:
            _follow(config, evaluator, tail, producer, stop, heartbeat)
    finally:
        producer.flush(FLUSH_S)
        blobs.close()
    return 0


def _follow(
    config: JobConfig, evaluator: Evaluator, tail: Tail, producer: Any, stop: threading.Event, heartbeat: Heartbeat
) -> None:
    topic = config.topic("updates")
    started_s = next_s = ask_s = beat_s = time.monotonic()
    grace_s = config.ps.lease_s + RESUME_GRACE_S
    heartbeat.expect("loop", within_s=MAX_EVALUATION_S)
    heartbeat.expect("kafka", within_s=MAX_EVALUATION_S + 3 * CHECK_KAFKA_EVERY_S, vital=False)
    heartbeat.set_waiting_for("")
    while not stop.is_set():
        heartbeat.beat("loop")
        if time.monotonic() >= ask_s:
            ask_s = time.monotonic() + CHECK_KAFKA_EVERY_S
            if tail.partition_ends(topic, 1) is not None:
                heartbeat.beat("kafka")
        if time.monotonic() >= beat_s:
            beat_s = time.monotonic() + HEARTBEAT_EVERY_S
            _send(producer, config.topic("metrics"), Metric(source="evaluator", values={}, time_s=time.time()))
        topic_records = tail.poll(POLL_S)
        evaluator.feed([one.record for one in topic_records])
        producer.poll(0)
        finished = evaluator.history.finished
        # What is in the topic from before is history, unless nothing follows it.
        news = tail.has_read_history(topic) and (
            any(one.offset >= tail.ends[topic] for one in topic_records) or time.monotonic() - started_s > grace_s
        )
        if finished is not None and news:
            _publish(config, evaluator, producer, evaluator.evaluate_final(finished.term, finished.version))
            log.info("job_finished", version=finished.version, reason=finished.reason)
            return
        now_s = time.monotonic()
        if now_s < next_s or not tail.has_read_history(topic):
            continue
        _publish(config, evaluator, producer, evaluator.evaluate_newest())
        # At most half of a processor, however large the model or the held-out set.
        ended_s = time.monotonic()
        next_s = max(now_s + config.evaluation.every_s, 2 * ended_s - now_s)


def _publish(config: JobConfig, evaluator: Evaluator, producer: Any, evaluation: Evaluation | None) -> None:
    if evaluation is None:
        return
    error = evaluation.error
    running, window = evaluator.history.prequential.running(), evaluator.history.prequential.windowed()
    values = {
        **error.metrics,
        "version": float(evaluation.version),
        "term": float(evaluation.term),
        "loss": error.loss,
        "evaluate_s": evaluation.seconds,
        "prequential_loss": running.loss,
        "prequential_window_loss": window.loss,
    }
    evaluated = Evaluated(term=evaluation.term, version=evaluation.version, loss=error.loss, accuracy=error.accuracy)
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    _send(producer, config.topic("events"), evaluated, key=b"evaluator")
    _send(producer, config.topic("metrics"), Metric(source="evaluator", values=known, time_s=evaluation.time_s))


def _send(producer: Any, topic: str, record: AnyRecord, key: bytes | None = None) -> None:
    # With the broker away for long the queue fills: a measurement that is lost is made again a second later.
    with suppress(BufferError):
        producer.produce(topic, encode(record), key=key)
        producer.poll(0)


def _checkpoint_reader(config: JobConfig, run_folder: Path) -> Any:
    """Reads version and weights of the newest checkpoint of the job."""
    from doll.evaluation.stored_weights import newest_weights

    return lambda model: newest_weights(config, run_folder, model)
