"""The comparison of `benchmarks.live.essp`, from runs; and the pace of its workers."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.live import essp
from benchmarks.live.essp import Run, best_of, claims, policy_of, read_run, table
from benchmarks.live.experiment import JOBS, Options
from benchmarks.live.slow_tasks import Pace
from doll.config import load

pytestmark = pytest.mark.slow  # loads torch


def run(policy: str, bound: int | None, loss: float, mean: float = -1.0, rate: float = 40.0, seed: int = 0) -> Run:
    curve = [(0.0, 0, 2.0), (5.0, 500, 1.5), (9.0, 1000, loss)]
    return Run("ratings", policy, bound, rate, seed, loss, 1000, 10, 0.25, curve, {"-1": 98, "-4": 2}, mean)


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_a_run_is_read_from_its_report_and_its_tables(tmp_path: Path) -> None:
    updates = [{"version": version, "samples_total": 32 * version} for version in (1, 2, 3)]
    evaluations = [
        {"time_s": 100.0 + at, "version": version, "loss": loss}
        for at, version, loss in ((0, 0, 9.0), (1, 2, 8.5), (2, 3, ""), (3, 3, "nan"))
    ]
    report = {
        "files": {"updates": _write(tmp_path / "u", updates), "evaluations": _write(tmp_path / "e", evaluations)},
        "measures": {"staleness": {"histogram": {"-1": 3}, "mean": -1.0}, "blocked_share": 0.5},
        "loss": 8.25, "error": None, "samples": 96, "updates": 3,
    }  # fmt: skip
    read = read_run("topics", "ssp:3", 0.0, 1, report)
    assert (read.label, read.loss, read.curve) == ("ssp s=3", 8.25, [(0.0, 0, 9.0), (1.0, 64, 8.5)])
    assert read.loss_at(64) == 8.5
    assert math.isinf(read.loss_at(65))
    for changed in ({"error": "diverged"}, {"loss": None}, {"loss": 1e9}):
        assert math.isinf(read_run("topics", "asp", 0.0, 1, report | changed).loss)


def test_each_policy_is_shown_at_its_best_step_size() -> None:
    runs = [run("ssp", 3, 0.9, rate=40), run("ssp", 3, math.inf, rate=80), run("asp", None, 0.8, rate=80),
            run("asp", None, 0.9, rate=40)]  # fmt: skip
    best = best_of(runs)
    assert [(each.label, each.rate) for each in best] == [("ssp s=3", 40), ("asp", 80)]
    row = table("ratings", best).rows[0]
    assert row == ["ssp s=3", "40", "0.9000", "1,000", "0.9000", "-1.00", "-4", "25 %"]


def verdicts(*runs: Run) -> list[str]:
    return [claim.verdict for claim in claims("ratings", runs)]


def test_the_papers_claims_are_judged_at_each_bound() -> None:
    good = [run("ssp", 1, 0.9, -1.4), run("essp", 1, 0.9, -1.2), run("ssp", 7, 1.1, -3.0), run("essp", 7, 0.9, -1.3)]
    assert verdicts(*good) == ["reproduced"] * 3
    staler = claims("ratings", [*good[:3], run("essp", 7, 0.9, -3.5)])
    assert [claim.verdict for claim in staler] == ["not reproduced", "reproduced", "reproduced"]
    assert staler[0].why == "SSP reads fresher ones at s = 7"
    assert verdicts(*good[:3], run("essp", 7, 1.2, -1.3))[1:] == ["not reproduced", "not reproduced"]
    assert claims("ratings", [run("ssp", 1, 0.9)]) == []


@pytest.mark.parametrize("task", ["ratings", "topics"])
@pytest.mark.parametrize("label", ["bsp", "asp", "vap", "ssp:15", "essp:1"])
def test_the_jobs_are_those_of_the_examples_with_a_pace(task: str, label: str, tmp_path: Path) -> None:
    for name in ("movielens_1m/ratings.csv.gz", "reuters21578/docs.jsonl.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    options = Options(tmp_path, settings=essp.SETTINGS)
    changes = [*essp.changes_of(task, options, tmp_path), f"training.policy={policy_of(label, task)}"]
    config = load(JOBS / essp._EXAMPLES[task] / "job.yaml", changes)
    assert config.training.policy.name == label.partition(":")[0]
    assert config.training.policy.sends_steps
    assert config.stop.seconds == 15
    assert config.stop.loss is None


def test_one_worker_is_slow_and_a_batch_takes_the_same_time_again(tmp_path: Path) -> None:
    slow, other, none = (Pace(mean_s, 3.0, str(tmp_path / "straggler")) for mean_s in (2.0, 2.0, 0.0))
    batches = [np.full(4, at) for at in range(400)]
    seconds = [slow.seconds(x) for x in batches]
    assert [other.seconds(x) for x in batches] == pytest.approx([value / 3.0 for value in seconds])
    assert [slow.seconds(x) for x in batches] == seconds
    assert np.mean(seconds) == pytest.approx(3.0 * 2.0 * 1.05, rel=0.05)
    assert none.seconds(batches[0]) == 0.0
