"""The process of the evaluator: it reads weights, and sends `Evaluated` records and metrics until the job has ended."""

from __future__ import annotations

import math
import threading
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from doll import telemetry
from doll.config import JobConfig
from doll.evaluation.evaluator import Evaluation, Evaluator
from doll.evaluation.holdout_topic import topic_samples
from doll.evaluation.live_records import LiveRecords
from doll.evaluation.live_watch import MovedBack
from doll.kafka.publisher import Publisher
from doll.kafka.reader import RESUME_GRACE_S, Partition, Tail
from doll.monitor.state.history import History
from doll.process import metric_names as names
from doll.process.health import Heartbeat, heartbeat_of
from doll.process.metric_names import HEARTBEAT_EVERY_S
from doll.process.signals import stop_requested
from doll.records.control import Drifted, Evaluated, Metric
from doll.services import Services
from doll.storage.stores import open_blobs
from doll.storage.version_marks import Verdict

if TYPE_CHECKING:
    from doll.evaluation.drift import Drift

log = telemetry.get_logger(__name__)

POLL_S = 0.2
FLUSH_S = 10.0
CHECK_KAFKA_EVERY_S = 5.0
MAX_EVALUATION_S = 300.0  # one round over a large held-out set, at a low priority


def run_evaluator(
    config: JobConfig, services: Services, run_folder: Path, *, after_term: int = 0, ended_term: int = 0
) -> int:  # fmt: skip
    """Evaluate until the job has finished or SIGTERM is received, and return the exit code 0.

    Call it in the main thread, since it handles SIGTERM and SIGINT. If Kafka becomes unavailable after the start, or
    Redis at any time, the evaluator waits.

    Args:
        after_term: terms up to this one belong to earlier runs. Their models, and the ends of these runs, are ignored.
        ended_term: terms up to this one have ended before. Their models are evaluated, and their ends are ignored.

    Raises:
        ConfigError: the task cannot be used.
        ServiceUnavailableError: Kafka does not answer at the start.
    """
    torch.set_num_threads(1)
    with stop_requested() as stop, heartbeat_of("evaluator", config) as heartbeat, ExitStack() as opened:
        # One failed call ends a round of evaluation, so that updates are followed even while Redis is unavailable.
        blobs = opened.enter_context(closing(open_blobs(config, services, give_up=lambda: True, timeout_s=5.0)))
        publisher = Publisher(config, services, acks="all")
        opened.callback(publisher.close, FLUSH_S)

        holdout = config.evaluation.holdout
        topic = None if holdout is None else holdout.topic
        samples_of = None if topic is None else partial(topic_samples, config, services, topic)
        live = None if config.versions.live is None else opened.enter_context(closing(LiveRecords(config, services)))
        has_inputs = config.drift is not None and config.drift.inputs is not None
        inputs = opened.enter_context(closing(LiveRecords(config, services))) if has_inputs else None
        evaluator = Evaluator(
            config, blobs, run_folder, after_term=after_term, samples_of=samples_of, live_records=live,
            input_records=inputs,
        )  # fmt: skip
        tail = opened.enter_context(Tail(config, services, (config.topic("updates"),)))
        _follow(config, evaluator, tail, publisher, stop, heartbeat, ended_term)
    return 0


def _follow(
    config: JobConfig,
    evaluator: Evaluator,
    tail: Tail,
    publisher: Publisher,
    stop: threading.Event,
    heartbeat: Heartbeat,
    ended_term: int,
) -> None:
    updates = Partition(config.topic("updates"))
    started_s = evaluate_at_s = check_kafka_at_s = heartbeat_at_s = time.monotonic()
    grace_s = config.ps.lease_s + RESUME_GRACE_S
    heartbeat.expect("loop", within_s=MAX_EVALUATION_S)
    heartbeat.expect("kafka", within_s=MAX_EVALUATION_S + 3 * CHECK_KAFKA_EVERY_S, vital=False)
    heartbeat.set_waiting_for("")
    while not stop.is_set():
        heartbeat.beat("loop")
        if time.monotonic() >= check_kafka_at_s:
            check_kafka_at_s = time.monotonic() + CHECK_KAFKA_EVERY_S
            if tail.partition_ends(updates.topic, 1) is not None:
                heartbeat.beat("kafka")
        if time.monotonic() >= heartbeat_at_s:
            heartbeat_at_s = time.monotonic() + HEARTBEAT_EVERY_S
            publisher.try_send(config.topic("metrics"), Metric(source=names.EVALUATOR, values={}, time_s=time.time()))
        entries = tail.poll(POLL_S)
        # An evaluator that was away finds what came meanwhile, and earlier drifts again: readers know these.
        _publish_drifts(config, evaluator.feed([entry.record for entry in entries]), publisher)
        _publish_drifts(config, evaluator.watch_inputs(), publisher)
        publisher.poll()
        _publish_move(config, evaluator.watch_live(), publisher)
        finished = evaluator.history.finished
        # A Finished record from before the start of this process counts only if no other record follows it.
        is_current = tail.has_read_history(updates) and (
            any(entry.offset >= tail.ends[updates] for entry in entries) or time.monotonic() - started_s > grace_s
        )
        if finished is not None and finished.term > ended_term and is_current:
            _publish(config, evaluator, publisher, evaluator.evaluate_final(finished.term, finished.version))
            _publish_verdict(config, evaluator.judge_newest(), publisher)
            log.info("job_finished", version=finished.version, reason=finished.reason)
            return
        now_s = time.monotonic()
        if now_s < evaluate_at_s or not tail.has_read_history(updates):
            continue
        _publish(config, evaluator, publisher, evaluator.evaluate_newest() or evaluator.not_measured())
        _publish_verdict(config, evaluator.judge_newest(), publisher)
        # Use at most half of one processor, even with a large model or held-out set.
        ended_s = time.monotonic()
        evaluate_at_s = max(now_s + config.evaluation.every_s, 2 * ended_s - now_s)


def _publish(config: JobConfig, evaluator: Evaluator, publisher: Publisher, evaluation: Evaluation | None) -> None:
    if evaluation is None:
        return
    error, history = evaluation.error, evaluator.history
    window = history.prequential.windowed()
    prequential = {"loss": window.loss, **window.metrics}
    held_out = history.held_out_records()
    of_records = {} if held_out is None else held_out.window_metrics
    values = {
        **error.metrics,
        names.VERSION: float(evaluation.version),
        names.TERM: float(evaluation.term),
        names.LOSS: error.loss,
        "evaluate_s": evaluation.seconds,
        "prequential_loss": history.prequential.running().loss,
        **{f"{names.PREQUENTIAL_WINDOW}{name}": value for name, value in prequential.items()},
        **{f"{names.PREQUENTIAL_FADING}{name}": value for name, value in _fading(config, history).items()},
        **{f"{names.HELD_OUT_RECORDS}{name}": value for name, value in of_records.items()},
    }
    reached = dict(values)
    if history.learned_updates >= history.prequential.window:  # few samples may reach any value
        reached |= {f"prequential_{name}": value for name, value in prequential.items()}
    metric = config.stop.metric or ""
    evaluated = Evaluated(
        term=evaluation.term, version=evaluation.version, loss=error.loss, accuracy=error.accuracy,
        metrics={metric: reached[metric]} if metric in reached else {},
    )  # fmt: skip
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    # While Kafka is unreachable, the queue may fill. A metric that is dropped is replaced by the next one.
    if evaluated.metrics or not math.isnan(error.loss):
        publisher.try_send(config.topic("events"), evaluated, key=b"evaluator")
    publisher.try_send(config.topic("metrics"), Metric(source=names.EVALUATOR, values=known, time_s=evaluation.time_s))


def _fading(config: JobConfig, history: History) -> dict[str, float]:
    if (half_life := config.evaluation.half_life_updates) is None:
        return {}
    means = history.prequential.faded(half_life)
    return {"loss": means.loss, **means.metrics}


def _publish_drifts(config: JobConfig, drifts: list[Drift], publisher: Publisher) -> None:
    for drift in drifts:
        facts = {
            "before": drift.before, "after": drift.after, "since": drift.since, "version": drift.version,
            "index": drift.index,
        }  # fmt: skip
        log.warning("drift", metric=drift.metric, **facts, offsets=drift.offsets)
        values = {f"{names.DRIFT}_{fact}_{drift.metric}": float(value) for fact, value in facts.items()}
        known = {name: value for name, value in values.items() if not math.isnan(value)}
        metric = Metric(source=names.EVALUATOR, values={names.DRIFT: 1.0, **known}, time_s=drift.time_s)
        publisher.try_send(config.topic("metrics"), metric)
        if not drift.index:  # the model has become worse: the server and the provisioner react
            drifted = Drifted(term=drift.term, version=drift.version, metric=drift.metric, since=drift.since)
            publisher.try_send(config.topic("events"), drifted, key=b"evaluator")


def _publish_move(config: JobConfig, moved: MovedBack | None, publisher: Publisher) -> None:
    if moved is not None:
        values = {names.MOVED_BACK: float(moved.version), names.MOVED_BACK_TO: float(moved.to)}
        publisher.try_send(config.topic("metrics"), Metric(source=names.EVALUATOR, values=values, time_s=moved.time_s))


def _publish_verdict(config: JobConfig, verdict: Verdict | None, publisher: Publisher) -> None:
    if verdict is None:
        return
    passed = {f"{names.GATE_PASSED}_{check.name}": float(check.passed) for check in verdict.checks}
    values = {names.GATE_VERSION: float(verdict.version), names.GATE_PASSED: float(verdict.passed), **passed}
    publisher.try_send(config.topic("metrics"), Metric(source=names.EVALUATOR, values=values, time_s=verdict.time_s))
