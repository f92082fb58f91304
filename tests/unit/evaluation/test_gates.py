"""Bad versions are held back, good ones are not, and the alias moves only as it may. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from doll.config.gates import GatesConfig, direction_of
from doll.evaluation.gates import Block, Judge, Measured, jackknife_error
from doll.metrics import auc, calibration, log_loss
from doll.metrics.states import MetricState
from doll.storage.version_marks import Check, Verdict, VersionMarks, decode_marks, encode_marks
from fuzzing import seeds
from pydantic import ValidationError

NOW_S = 1_790_000_000.0
SAMPLES, BLOCKS = 2_000, 20
GATES = GatesConfig.model_validate({
    "metrics": {"loss": 0.005, "auc": 0.002, "auc[0]": 0.01, "calibration": 0.03}, "max_event_age_s": 600,
    "max_shift": 0.25,
})  # fmt: skip


class Stream:
    """Held-out samples with clicks and a segment, and versions of a model whose logits have errors."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.truth = self.rng.normal(0, 1.5, SAMPLES)
        self.clicked = (self.rng.random(SAMPLES) < 1 / (1 + np.exp(-self.truth))).astype(float)
        self.segment = self.rng.integers(0, 4, SAMPLES)
        self.error = self.rng.normal(0, 0.5, SAMPLES)

    def version(self, number: int, worse: Callable[[Any], Any] = lambda logits: logits, **more: Any) -> Measured:
        """The next version of a model that moves a little with each update."""
        self.error = 0.98 * self.error + 0.1 * self.rng.normal(0, 1, SAMPLES)
        logits = worse(self.truth + self.error)
        p = 1 / (1 + np.exp(-logits))
        blocks = []
        for at in np.array_split(np.arange(SAMPLES), BLOCKS):
            first = at[self.segment[at] == 0]
            states: dict[str, MetricState] = {
                "auc": auc(logits[at], self.clicked[at]).in_memory(),
                "auc[0]": auc(logits[first], self.clicked[first]).in_memory(),
                "calibration": calibration(p[at], self.clicked[at]),
            }
            losses = log_loss(p[at], self.clicked[at])
            blocks.append(Block(len(at), {"loss": losses.compute() * len(at)}, states))
        facts: dict[str, Any] = {
            "updates": number, "size_bytes": 1_000, "newest_event_s": NOW_S - 30, "blocks": blocks,
            "outputs": {"output": logits}, "answers_s": float(self.rng.uniform(0.9, 1.3)),
            "tensors": {"a": float(self.rng.uniform(0.5, 2)), "b": float(self.rng.uniform(0.5, 2))},
            "lengths": {"a": 30.0, "b": 4.0},
        }  # fmt: skip
        return Measured(version=number, **facts | more)

    def spoiled(self, logits: Any) -> Any:
        return np.where(self.segment == 0, -logits, logits)


def judged(judge: Judge, candidate: Measured, stable: Measured | None) -> Verdict:
    checks = judge.weights(candidate, stable, NOW_S)
    return judge.verdict(candidate, stable, [*checks, *judge.answers(candidate, stable)], NOW_S)


BAD: dict[str, Callable[[Stream, int], Measured]] = {
    "exploded": lambda stream, at: stream.version(at, tensors={"a": 1.0, "b": 80.0}),
    "not finite": lambda stream, at: stream.version(at, lengths={"a": float("nan"), "b": 1.0}),
    "segment": lambda stream, at: stream.version(at, stream.spoiled),
    "calibration": lambda stream, at: stream.version(at, lambda logits: logits - 0.6),
    "poisoned": lambda stream, at: stream.version(at, lambda logits: 0.3 * logits + stream.rng.normal(0, 1, SAMPLES)),
    "slow": lambda stream, at: stream.version(at, answers_s=8.0),
    "stale": lambda stream, at: stream.version(at, newest_event_s=NOW_S - 4_000),
    "large": lambda stream, at: stream.version(at, size_bytes=5_000),
    "task": lambda stream, at: stream.version(at, own="the price is negative"),
}


def test_bad_versions_are_held_back_and_good_ones_are_not() -> None:
    rng, held_back, missed = random.Random(7), Counter[str](), Counter[str]()
    good = 0
    for seed in seeds(15):
        stream, judge = Stream(seed), Judge(GATES)
        stable = stream.version(1)
        for number in range(2, 61):
            if number > 5 and rng.random() < 0.25:
                kind = rng.choice(list(BAD))
                missed[kind] += judged(judge, BAD[kind](stream, number), stable).passed
                continue
            candidate = stream.version(number)
            good += 1
            verdict = judged(judge, candidate, stable)
            if verdict.passed:
                stable = candidate
            else:
                held_back[verdict.text()] += 1
    assert not +missed
    assert held_back.total() <= 0.01 * good, held_back


def test_a_difference_within_its_noise_holds_nothing_back_and_a_better_version_passes() -> None:
    stream, judge = Stream(1), Judge(GATES)
    stable = stream.version(1)
    better = stream.version(2, lambda logits: stream.truth)
    assert judged(judge, better, stable).passed
    verdict = judged(judge, stable, better)
    assert [check.name for check in verdict.checks if not check.passed] == ["loss", "auc"], verdict.text()
    assert "version 2 has" in verdict.text()


def test_the_error_of_a_difference_is_that_of_its_samples() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(0, 1, (BLOCKS, 100))
    without = [float(np.delete(values, at, axis=0).mean()) for at in range(BLOCKS)]
    assert jackknife_error(without) == pytest.approx(values.mean(axis=1).std(ddof=1) / BLOCKS**0.5)
    assert jackknife_error([1.0]) == 0.0


def test_the_first_version_needs_no_other_and_one_without_held_out_samples_is_judged_by_its_weights() -> None:
    judge = Judge(GATES)
    assert judged(judge, Measured(version=1, lengths={"a": 1.0}), None).passed
    broken = judged(judge, Measured(version=2, lengths={"a": float("inf")}), None)
    assert (broken.passed, broken.text()) == (False, "held back (finite: a has values that are not finite)")


def test_a_metric_that_the_task_lacks_or_that_is_not_a_number_holds_back() -> None:
    blocks = [Block(1.0, {"loss": float("nan")}, {})]
    gates = GatesConfig.model_validate({"metrics": {"loss": 0.1, "auc": 0.1}})
    verdict = judged(Judge(gates), Measured(version=1, blocks=blocks), None)
    assert verdict.text() == "held back (loss: not a finite number; auc: the task has none)"


def test_which_values_are_better_must_be_known() -> None:
    assert (direction_of("auc[3]"), direction_of("calibration"), direction_of("gini")) == ("higher", "one", None)
    with pytest.raises(ValidationError, match=r"metrics\.gini: expected better: lower, higher or one"):
        GatesConfig.model_validate({"metrics": {"gini": 0.1}})
    gates = GatesConfig.model_validate({"metrics": {"gini": {"tolerance": 0.1, "better": "higher"}}})
    one, two = (Measured(version=at, blocks=[Block(1.0, {"gini": value}, {})]) for at, value in ((1, 0.5), (2, 0.3)))
    assert not judged(Judge(gates), two, one).passed
    assert judged(Judge(gates), one, two).passed


def test_metrics_that_are_missing_in_some_blocks_end_no_gate() -> None:
    gates = GatesConfig.model_validate({"metrics": {"auc": 0.1}})
    old = [Block(1.0, {"auc": value}, {}) for value in (0.7, 0.8, 0.9)]
    new = [Block(1.0, {"auc": 0.8}, {}), Block(1.0, {}, {}), Block(1.0, {"auc": 0.8}, {})]
    assert judged(Judge(gates), Measured(version=2, blocks=new), Measured(version=1, blocks=old)).passed
    assert judged(Judge(gates), Measured(version=2, blocks=new), Measured(version=1, blocks=[])).passed


def verdict(version: int, against: int | None = None, *, passed: bool = True, time_s: float = 0.0) -> Verdict:
    return Verdict(version, against, time_s, passed, (Check("loss", passed, "0.3"),))


def test_the_alias_moves_with_the_verdict() -> None:
    marks = VersionMarks().judged("stable", verdict(3), [3])
    assert (marks.aliases, marks.moved_s) == ({"stable": 3}, {"stable": 0.0})
    marks = marks.judged("stable", verdict(4, 3, passed=False), [3, 4])
    assert marks.aliases == {"stable": 3}
    assert [item.version for item in marks.verdicts] == [3, 4]
    assert decode_marks(encode_marks(marks), "here") == marks
    marks = marks.judged("stable", verdict(5, 3), [3, 5])
    assert (marks.aliases, [item.version for item in marks.verdicts]) == ({"stable": 5}, [3, 5])
    assert marks.judged("stable", verdict(5, 3), [3, 5]) == marks, "a second gate writes the same"


def test_a_frozen_or_moved_alias_and_one_that_moved_a_moment_ago_stay() -> None:
    marks = VersionMarks().judged("stable", verdict(3, time_s=100.0), [3])
    frozen = marks.with_freeze("stable", "a sale")
    assert frozen.judged("stable", verdict(4, 3), [3, 4]).aliases == {"stable": 3}
    assert frozen.with_freeze("stable", None) == marks
    by_hand = marks.with_alias("stable", 2, "4 is wrong")
    after = by_hand.judged("stable", verdict(4, 3), [2, 3, 4])
    assert (after.aliases, after.reasons) == ({"stable": 2}, {"stable": "4 is wrong"})
    assert after.judged("stable", verdict(5, 2), [2, 5]).reasons == {}
    assert marks.judged("stable", verdict(9, None), [9]).aliases == {"stable": 9}, "3 was deleted"
    soon = verdict(4, 3, time_s=130.0)
    assert marks.judged("stable", soon, [3, 4], min_interval_s=60.0).aliases == {"stable": 3}
    assert marks.judged("stable", soon, [3, 4], min_interval_s=30.0).aliases == {"stable": 4}


def test_marks_without_gates_are_those_of_earlier_releases() -> None:
    assert b'"schema": 1' in encode_marks(VersionMarks({"stable": 3}, (4,)))
    assert b'"schema": 2' in encode_marks(VersionMarks({"stable": 3}).with_freeze("stable", ""))


def test_what_a_restart_does_not_know_of_steps_is_no_reason() -> None:
    stream = Stream(2)
    stable = stream.version(1)
    (check,) = (item for item in Judge(GATES).weights(stream.version(2), stable, NOW_S) if item.name == "step")
    assert (check.passed, check.text) == (True, "no usual step is known yet")
    assert not Judge(GATES).weights(replace(stable, newest_event_s=0.0), None, NOW_S)[1].passed
