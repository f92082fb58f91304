"""Why a job ends."""

from __future__ import annotations

import math

import pytest
from doll.config import StopConfig
from doll.ps.engine.stopping import is_target, progress_reached, target_reached, time_reached
from doll.records.control import Evaluated


@pytest.mark.parametrize(
    "stop",
    [StopConfig(loss=0.5), StopConfig(accuracy=0.7), StopConfig(metric="auc", at_least=0.8),
     StopConfig(metric="auc", at_most=0.8)],
)  # fmt: skip
def test_a_target_that_is_reached_leaves_no_work(stop: StopConfig) -> None:
    """`doll spot` says of such a job that it has met its deadline, although it has made fewer updates than planned."""
    evaluation = Evaluated(term=1, version=9, loss=0.4, accuracy=0.8, metrics={"auc": 0.8})
    reason = target_reached(stop, evaluation)
    assert reason is not None
    assert is_target(reason)


@pytest.mark.parametrize(
    "reason",
    [
        progress_reached(StopConfig(updates=5), updates=5, samples_total=0),
        progress_reached(StopConfig(samples=5), updates=5, samples_total=9),
        time_reached(StopConfig(seconds=1.0), 2.0), "interrupted",
    ],
)  # fmt: skip
def test_other_ends_are_no_targets(reason: str | None) -> None:
    assert reason is not None
    assert not is_target(reason)


@pytest.mark.parametrize("stop", [StopConfig(metric="auc", at_least=0.9), StopConfig(metric="ne", at_most=0.9)])
@pytest.mark.parametrize("value", [0.89, math.nan])
def test_a_metric_that_is_not_reached_ends_nothing(stop: StopConfig, value: float) -> None:
    assert target_reached(stop, Evaluated(term=1, version=9, loss=0.4, metrics={"auc": value})) is None


@pytest.mark.parametrize("rule", [{"metric": "auc"}, {"at_least": 0.5}, {"metric": "a", "at_least": 1, "at_most": 2}])
def test_a_metric_has_one_bound(rule: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="metric with at_least or at_most"):
        StopConfig.model_validate(rule)
