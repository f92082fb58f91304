"""What `benchmarks.live.mlless_functions` makes of its runs."""

from __future__ import annotations

import pytest
from benchmarks.live.experiment import Options, Skip
from benchmarks.live.mlless_functions import (
    ALL_REDUCE,
    MACHINES,
    PLAIN,
    SETTINGS,
    TUNED,
    Row,
    changes_of,
    claims,
    table,
    usd_since,
)
from doll.config import load

pytestmark = pytest.mark.slow


def row(arm: str, time_s: float, usd: float, seed: int = 0, *, is_reached: bool = True) -> Row:
    return Row("PMF", arm, seed, is_reached, time_s, usd, 200, 0.76, time_s + 10, usd + 0.001)


def test_a_bill_counts_from_the_first_update() -> None:
    ended = [
        {"ended_s": 100.0, "billed_s": 60.0, "usd": 6.0},  # half of it before
        {"ended_s": 90.0, "billed_s": 10.0, "usd": 1.0},
        {"ended_s": 60.0, "billed_s": 30.0, "usd": 3.0},  # before
        {"ended_s": 80.0, "billed_s": 0.0, "usd": 0.0},  # not started
    ]
    assert usd_since(ended, 70.0) == pytest.approx(4.0)
    assert usd_since(ended, 0.0) == pytest.approx(10.0)


def test_runs_of_one_seed_are_compared_if_both_have_reached_the_loss() -> None:
    rows = [
        row(PLAIN, 100, 0.02), row(TUNED, 80, 0.015), row(MACHINES, 100, 0.007), row(ALL_REDUCE, 10, 0.007),
        row(PLAIN, 100, 0.02, 1), row(TUNED, 50, 0.01, 1, is_reached=False),
    ]  # fmt: skip
    tuned, machines, all_reduce = claims(rows)
    assert tuned.ours.startswith("1.67; with starts ")
    assert tuned.verdict == "reproduced"
    assert (machines.ours.split(";")[0], machines.verdict) == ("0.58", "not reproduced")
    assert (all_reduce.ours, all_reduce.verdict) == ("0.06", "not reproduced")
    assert [line[:3] for line in table(rows).rows] == [
        ["PMF", PLAIN, "2 of 2"], ["PMF", TUNED, "1 of 2"], ["PMF", MACHINES, "1 of 1"], ["PMF", ALL_REDUCE, "1 of 1"],
    ]  # fmt: skip


def test_a_job_has_the_settings_of_its_key() -> None:
    options = Options(settings={**SETTINGS, "pmf_lr": "7", "workers": "3"})
    try:
        learned, changes = changes_of("PMF", options)
    except Skip as reason:
        pytest.skip(str(reason))
    job = load(learned.job, changes)
    assert (job.data.workers, job.stop.loss, job.training.policy.averages_workers) == (3, 0.765, True)
    assert "lr: 7" in " ".join(changes)
