"""Each drift is decided once, within the limits of the job file, and the command makes a job on the same stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from doll.config import parse
from doll.config.drift import ChallengerConfig
from doll.monitor.state.challengers import (
    Challenge,
    NoticedDrift,
    challenger_advice,
    challenger_arguments,
    decide,
    settings_of,
)
from doll.monitor.state.progress import ProgressModel
from doll.process.metric_names import EVALUATOR
from doll.records.control import Metric

JOB = """
job: clicks
task: {class: "examples.synthetic.task:Gaussian"}
data: {workers: 2, partitions: 4, batch_size: 8}
source: {kind: python, of: examples.synthetic.source:gaussians}
checkpoint: {folder: kept}
fleet: {kind: ray}
training: {optimizer: {name: sgd, lr: 0.1}}
drift: {challenger: {begin_with: stable, most: 2, min_interval_s: 100}}
"""
LIMITS = ChallengerConfig(most=2, min_interval_s=100)


def decided(*drifts: tuple[str, int, float], now_s: float = 0.0, limits: ChallengerConfig = LIMITS) -> list[Challenge]:
    earlier: list[Challenge] = []
    for metric, version, time_s in drifts:
        decision = decide(limits, NoticedDrift(metric, version, time_s), earlier, now_s or time_s)
        earlier += [] if decision is None else [decision]
    return earlier


def test_a_drift_is_decided_once_also_after_a_restart() -> None:
    (first,) = decided(("loss", 90, 1e9), ("loss", 90, 1e9))
    assert (first.version, first.refusal) == (90, "")
    assert decide(LIMITS, NoticedDrift("loss", 90, 1e9), [first], 1e9 + 500) is None
    (late,) = decided(("loss", 90, 1e9), ("loss", 90, 1e9), now_s=1e9 + 7200)
    assert late.refusal.startswith("the drift was noticed 7,200 s after it came")


@pytest.mark.parametrize(
    ("drifts", "refusals"),
    [
        ([("loss", 90, 1e9), ("auc", 92, 1e9 + 50)], ["", "50 s after the last one, and"]),
        ([("loss", 90, 1e9), ("loss", 95, 1e9 + 50), ("loss", 99, 1e9 + 120)], ["", "50 s after", ""]),
        ([("a", 1, 1e9), ("b", 2, 2e9), ("c", 3, 3e9)], ["", "", "drift.challenger.most is 2"]),
        ([("a", 1, 1e9), ("b", 1, 1e9)], ["", "the drift of another metric at the same update has one"]),
    ],
)
def test_the_number_and_the_time_between_are_limited(drifts: list[tuple[str, int, float]], refusals: list[str]) -> None:
    for item, refusal in zip(decided(*drifts), refusals, strict=True):
        assert item.refusal.startswith(refusal)
        assert bool(item.refusal) == bool(refusal)


def test_the_command_makes_a_job_of_its_own_on_the_stream_of_the_job() -> None:
    config = parse(JOB)
    command = challenger_arguments(config, 90, job_file="JOB", source="runs/a", kafka="host:1")
    assert command[:2] == ["up", "JOB"]
    made = parse(JOB, command[3::2])
    assert made.job == "clicks-challenger-90"
    assert (made.data.topic, made.data.partitions, made.data.start) == ("doll.clicks.samples", None, "latest")
    assert (made.source, made.checkpoint.folder, made.fleet.kind) == (None, None, "processes")
    assert made.training.init_from is not None
    assert made.training.init_from.source == "runs/a@stable"
    assert settings_of(config) is not None
    assert settings_of(made) is None, "a challenger starts none"
    assert made.kafka.address == "host:1"
    assert made.training.optimizer == config.training.optimizer
    # It begins with new weights, and the name of the job is long.
    other = JOB.replace("job: clicks", f"job: {'c' * 63}").replace("begin_with: stable, ", "")
    command = challenger_arguments(parse(other), 123_456_789, job_file="JOB", source="")
    assert parse(other, command[3::2]).training.init_from is None


def test_the_event_of_a_drift_names_the_command_of_a_job_that_wants_one() -> None:
    facts = {f"drift_{name}_loss": value for name, value in (("before", 0.1), ("after", 0.9), ("since", 80.0))}
    drift = {"drift": 1.0, "drift_version_loss": 90.0, "drift_index_loss": 0.0, **facts}
    for text, is_named in (
        (JOB, True),
        (JOB.replace("challenger: {begin_with: stable, most: 2, min_interval_s: 100}", ""), False),
    ):
        model = ProgressModel(parse(text), 0.0)
        for _ in range(2):  # an evaluator that was started again
            model.feed(Metric(source=EVALUATOR, values=drift, time_s=7.0))
        model.feed(Metric(source=EVALUATOR, values=drift | {"drift_index_loss": 0.5}, time_s=8.0))
        assert model.drifts == [NoticedDrift("loss", 90, 7.0)]
        ((_, said),) = model.all_events
        assert ("doll up JOB.yaml --set job=clicks-challenger-90 --set data.topic=" in said) == is_named
        assert ("--set training.init_from=kept@stable" in said) == is_named


def test_a_recipe_is_named_by_its_file() -> None:
    config = parse(JOB.replace("{begin_with: stable, most: 2, min_interval_s: 100}", "faster.yaml"))
    assert config.drift is not None
    assert config.drift.challenger == ChallengerConfig(job=Path("faster.yaml"))
    assert "doll up faster.yaml --set job=" in challenger_advice(config, 3)
