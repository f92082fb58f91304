"""What the evaluator publishes of metrics: held-out and prequential values, and the one that a stop rule names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import record_builders
from doll import metrics
from doll.config import parse
from doll.evaluation.drift import Drift
from doll.evaluation.evaluator import Evaluation, Evaluator
from doll.evaluation.heldout import HeldOutError
from doll.evaluation.main import _publish, _publish_drifts
from doll.kafka.publisher import Publisher
from doll.metrics.states import to_bytes
from doll.ps.engine.stopping import target_reached
from doll.records.control import Drifted, Evaluated, Metric
from memory_stores import MemoryBlobs

pytestmark = pytest.mark.slow  # loads torch

JOB = """
job: unit
task: {class: "%s", args: {features: 6}}
data: {workers: 1, batch_size: 8}
stop: {%s}
"""
HELD_OUT, NONE = "metric_task:Scored", "examples.synthetic.task:Gaussian"


class Sent:
    """A publisher that keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def try_send(self, topic: str, record: Any, *, key: bytes | None = None) -> None:
        self.records.append(record)


def follow(evaluator: Evaluator, *versions: int) -> None:
    state = to_bytes(metrics.auc([0.1, 0.4, 0.8, 0.9], [0, 1, 0, 1]))
    for version in versions:
        update = record_builders.update(1, version)
        evaluator.feed([msgspec.structs.replace(update, n_samples=4, metrics={"auc": state, "hits": 0.5})])


def test_without_held_out_samples_a_full_window_ends_the_job(tmp_path: Path) -> None:
    config = parse(JOB % (NONE, "metric: prequential_auc, at_least: 0.75"), [])
    evaluator, sent = Evaluator(config, MemoryBlobs(), tmp_path), Sent()
    evaluator.feed([record_builders.term_started(1)])
    assert evaluator.not_measured() is None
    follow(evaluator, 1, 2)
    _publish(config, evaluator, cast(Publisher, sent), evaluator.not_measured())
    assert evaluator.not_measured() is None, "once for each version"
    (values,) = sent.records
    assert isinstance(values, Metric)
    assert values.values["prequential_window_auc"] == 0.75
    assert values.values["prequential_window_hits"] == 0.5
    assert "loss" not in values.values
    follow(evaluator, *range(3, 51))
    _publish(config, evaluator, cast(Publisher, sent), evaluator.not_measured())
    _, evaluated, _ = sent.records
    assert isinstance(evaluated, Evaluated)
    assert math.isnan(evaluated.loss)
    assert evaluated.metrics == {"prequential_auc": 0.75}
    reason = "metric: prequential_auc 0.7500 at version 50 reached at least 0.75"
    assert target_reached(config.stop, evaluated) == reason


@pytest.mark.parametrize(("rule", "named"), [("metric: auc, at_most: 0.5", {"auc": 0.25}), ("loss: 0.1", {})])
def test_a_held_out_metric_is_sent_for_the_rule_that_names_it(
    tmp_path: Path, rule: str, named: dict[str, float]
) -> None:
    config = parse(JOB % (HELD_OUT, rule), [])
    evaluator, sent = Evaluator(config, MemoryBlobs(), tmp_path), Sent()
    evaluator.feed([record_builders.term_started(1)])
    follow(evaluator, 1)
    assert evaluator.not_measured() is None
    error = HeldOutError(0.5, {"auc": 0.25, "auc_stderr": 0.1})
    _publish(config, evaluator, cast(Publisher, sent), Evaluation(1, 1, error, 0.1, 5.0))
    evaluated, values = sent.records
    assert evaluated.metrics == named
    assert (values.values["auc"], values.values["auc_stderr"]) == (0.25, 0.1)


def test_a_drift_goes_to_page_server_and_provisioner() -> None:
    config = parse(JOB % (NONE, "updates: 9"), ["drift={}"])
    drift = Drift(
        metric="loss", detector="adwin", before=0.2, after=0.4, since=7, version=9, time_s=3.0, offsets=((0, 8, 24),),
        term=2,
    )  # fmt: skip
    sent = Sent()
    _publish_drifts(config, [drift], cast(Publisher, sent))
    assert [type(record).__name__ for record in sent.records] == ["Metric", "Drifted"]
    assert sent.records[1] == Drifted(term=2, version=9, metric="loss", since=7)
