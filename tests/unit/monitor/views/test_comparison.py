"""The table of a comparison: from run folders as runs leave them, also where a run has failed half-way."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doll.monitor.state.csv_file import CsvFile
from doll.monitor.state.history import History
from doll.monitor.state.policy_summary import PolicySummary
from doll.monitor.views.comparison import Comparison, LossCurve, LossKind, PolicyRun, read_run
from doll.process.files import json_safe, write_json
from doll.records.control import Measures
from record_builders import term_started, update

MEASURES = Measures(
    staleness={-3: 2, -1: 97, 0: 1}, staleness_total=-103, blocked_s=1.0, computing_s=3.0, idle_s=1.0,
    gradient_bytes=2_000_000, dense_gradient_bytes=8_000_000, weights_bytes=500,
)  # fmt: skip


def run_folder(folder: Path, losses: list[float], *, every_s: float, evaluate_every: int = 0, **report: Any) -> Path:
    """What a run of one update per `every_s` leaves; without `report`, as one that was killed."""
    history = History()
    history.feed(term_started(1))
    for version, loss in enumerate(losses, 1):
        time_s = 1000.0 + every_s * version
        history.feed(update(1, version, (0, version), loss=loss, samples_total=8 * version, time_s=time_s))
        if evaluate_every and version % evaluate_every == 0:
            history.evaluated(time_s=time_s + 0.7, term=1, version=version, loss=loss / 2, metrics={})
    CsvFile(folder / "updates.csv", history.updates).sync()
    CsvFile(folder / "evaluations.csv", history.evaluations).sync()
    if report:
        content = {
            "reason": "samples: reached", "error": None, "exit_code": 0, "audit": {"ok": True},
            "step_factor": 4.0, "step_samples": 128,
            "training_seconds": every_s * (len(losses) - 1), "samples": 8 * len(losses), "updates": len(losses),
            "measures": json_safe(PolicySummary.total([MEASURES]).to_dict()),  # type: ignore[union-attr]
        }  # fmt: skip
        write_json(folder / "report.json", content | report)
    return folder


FALLING = [4.0 - 0.03 * number for number in range(100)]


@pytest.fixture
def fast(tmp_path: Path) -> PolicyRun:
    folder = run_folder(tmp_path / "fast", FALLING, every_s=0.5, evaluate_every=10, kept=True)
    return replace(read_run("bsp", folder, usd_per_h=7.2), step_factor=1.0)


@pytest.fixture
def slow(tmp_path: Path) -> PolicyRun:
    folder = run_folder(tmp_path / "slow", FALLING[:60], every_s=2.0, evaluate_every=10, kept=True)
    return read_run("doll:group_size=8", folder, usd_per_h=7.2)


def test_a_run_is_read_from_its_folder(fast: PolicyRun) -> None:
    assert (fast.ok, fast.outcome, fast.updates, fast.samples) == (True, "samples: reached", 100, 800)
    assert fast.seconds == pytest.approx(49.5)
    assert fast.usd == pytest.approx(7.2 * 49.5 / 3600)
    assert fast.summary == PolicySummary.total([MEASURES])
    curve = fast.loss("held-out")
    # When version 10 was made, not when it was evaluated: 9 updates after the first one.
    assert (curve.seconds[0], curve.samples[0]) == (4.5, 80)
    assert curve.loss[0] == pytest.approx(FALLING[9] / 2)
    assert curve.reached(FALLING[19] / 2) == (9.5, 160, 20)
    assert curve.reached(0.1) is None


def test_without_a_target_the_times_are_to_the_best_loss_that_all_reached(fast: PolicyRun, slow: PolicyRun) -> None:
    comparison = Comparison("digits", [fast, slow])
    assert comparison.target_loss == slow.loss("held-out").best == pytest.approx(FALLING[59] / 2)
    reached = [comparison.reached(run) for run in comparison.runs]
    assert [item and item.updates for item in reached] == [60, 60]
    assert [item and item.seconds for item in reached] == [29.5, 118.0]
    given = Comparison("digits", [fast, slow], target=FALLING[79] / 2)
    assert [given.reached(run) is None for run in given.runs] == [False, True]


def test_the_table_has_a_row_for_each_policy(fast: PolicyRun, slow: PolicyRun) -> None:
    lines = Comparison("digits", [fast, slow], wanted=["bsp", "doll:group_size=8"]).text().splitlines()
    assert lines[0] == "digits: time and samples to a held-out loss of 1.11, the best that every policy reached"
    header, row, other = lines[1:4]
    assert header.split() == [
        "policy", "step", "time", "to", "loss", "samples", "to", "loss", "time", "samples", "updates", "loss",
        "gradients", "weights", "staleness", "blocked", "USD",
    ]  # fmt: skip
    assert row.split()[:6] == ["bsp", "128", "samples", "30", "s", "480"]
    assert "2.0 MB of 8.0 MB" in row
    assert "-1.03 (p99 -3, 100 % of reads)" in row
    assert "25 %" in row
    assert other.startswith("doll:group_size=8")
    assert len({len(line) for line in lines[1:4]}) == 1, "the columns stand below each other"


def test_steps_of_different_sizes_are_said_beside_the_table(fast: PolicyRun, slow: PolicyRun) -> None:
    unequal, equal = (Comparison("digits", [fast, other]).text() for other in (slow, replace(slow, step_factor=1.0)))
    assert "128 samples, 4 x bsp" in unequal
    assert "note: the same training.optimizer.lr makes steps of different sizes here" in unequal
    assert "note" not in equal
    assert [item["step_factor"] for item in Comparison("digits", [fast, slow]).to_dict()["policies"]] == [1.0, 4.0]


def test_a_run_that_was_killed_half_way_shows_what_it_left(tmp_path: Path, fast: PolicyRun) -> None:
    killed = read_run("asp", run_folder(tmp_path / "killed", FALLING[:30], every_s=0.1), usd_per_h=7.2)
    assert (killed.ok, killed.updates, killed.samples, killed.summary) == (False, 30, 240, None)
    comparison = Comparison("digits", [fast, killed], wanted=["bsp", "asp", "doll"])
    assert comparison.kind == "prequential", "the one that was killed was not evaluated"
    text = comparison.text()
    assert "asp: failed: it left no report" in text
    assert "not run: doll" in text
    content = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert content["not_run"] == ["doll"]
    assert [item["ok"] for item in content["policies"]] == [True, False]
    assert content["policies"][0]["staleness"]["histogram"] == {"-3": 2, "-1": 97, "0": 1}
    assert content["policies"][1]["staleness"] is None
    assert content["policies"][1]["seconds"] is None
    assert content["policies"][1]["updates"] == 30


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path / "failed", [*FALLING[:20], math.nan], every_s=0.1, error="ps failed; its log:\n  a()\n  diverged",
        exit_code=1,
    )  # fmt: skip
    run = read_run("asp", folder, usd_per_h=math.nan)
    assert (run.ok, run.outcome) == (False, "ps failed; its log:\n  a()\n  diverged")
    assert "asp: failed: ps failed; its log: ... diverged" in Comparison("digits", [run]).text()


def test_a_policy_that_never_began_has_a_row_too() -> None:
    run = PolicyRun("bsp", "no Redis", ok=False)
    comparison = Comparison("digits", [run], wanted=["bsp"])
    assert "digits: no loss" in comparison.text()
    assert "bsp: failed: no Redis" in comparison.text()
    assert comparison.to_dict()["target_loss"] is None


def learned(label: str, seed: int, accuracy: float, *, seconds: float = 10.0) -> PolicyRun:
    curve = LossCurve(
        seconds=np.array([0.0, seconds]), samples=np.array([0.0, 800.0]), versions=np.array([0.0, 100.0]),
        loss=np.array([2.0, 1 - accuracy]), accuracy=np.array([math.nan, accuracy]),
    )  # fmt: skip
    losses: dict[LossKind, LossCurve] = {"held-out": curve}
    return PolicyRun(label, "samples: reached", ok=True, seconds=seconds, updates=100, seed=seed, losses=losses)


def compared(*runs: PolicyRun) -> Comparison:
    labels, seeds = (list(dict.fromkeys(part)) for part in zip(*((run.label, run.seed) for run in runs), strict=True))
    return Comparison("digits", runs, target=0.5, wanted=labels, seeds=seeds)


THREE = [
    learned(label, seed, accuracy + 0.02 * seed, seconds=seconds + seed)
    for label, accuracy, seconds in (("bsp", 0.90, 30.0), ("doll", 0.93, 29.5), ("asp", 0.70, 12.0))
    for seed in (0, 1, 2)
]


def test_the_last_line_says_which_policy_was_best_and_by_what() -> None:
    """doll is .03 better than bsp with each seed, although a seed alone moves both by .02: pairs cancel that."""
    line = compared(*THREE).text().splitlines()[-1]
    assert line.startswith(
        "best: by held-out accuracy doll (0.95 ± 0.0115; more than noise); by time to the loss asp (13 s ± 1 s; more "
    )
    assert "bytes" not in line
    assert "USD" not in line
    assert line.endswith(
        "Note: a difference is noise if its mean over 3 seeds is within 4.3 of its standard errors (paired t test, 5 %)"
    )


def test_from_one_seed_noise_is_not_known() -> None:
    line = compared(*(replace(run, usd=run.seconds / 100) for run in THREE if run.seed == 0)).conclusion()
    assert line.startswith("best: by held-out accuracy doll (0.93; then bsp, 0.9); by time")
    assert "by USD asp (0.12; then doll, 0.29" in line
    assert line.endswith("is not known from one seed: run again with --seeds 3")


def test_differences_that_change_their_sign_are_noise() -> None:
    runs = [learned("bsp", seed, value) for seed, value in enumerate((0.90, 0.94, 0.92))]
    runs += [learned("doll", seed, value) for seed, value in enumerate((0.93, 0.92, 0.94))]
    assert "by held-out accuracy doll (0.93 ± 0.00577; bsp: within noise)" in compared(*runs).conclusion()


def test_equal_values_are_no_difference() -> None:
    one = compared(learned("bsp", 0, 0.9), learned("doll", 0, 0.9))
    assert "by held-out accuracy bsp (0.9; doll: the same)" in one.conclusion()
    two = compared(*(learned(label, seed, 0.9) for label in ("bsp", "doll") for seed in (0, 1)))
    assert "bsp (0.9 ± 0; doll: within noise)" in two.conclusion()


def test_one_policy_is_not_compared() -> None:
    assert compared(*(run for run in THREE if run.label == "bsp")).conclusion() == ""
    assert Comparison("digits", ()).conclusion() == ""


def test_a_policy_with_a_failed_run_is_not_best() -> None:
    runs = [replace(run, ok=False) if (run.label, run.seed) == ("doll", 1) else run for run in THREE]
    (by_accuracy, *_) = [best for _, best in compared(*runs).best()]
    assert (by_accuracy.policy, by_accuracy.second, by_accuracy.seeds) == ("bsp", "asp", 3)


def test_seeds_that_not_every_policy_has_run_are_left_out() -> None:
    """The last run was ended by the user: its bytes and times are those of a part of the stream."""
    runs = [replace(run, outcome="stopped by you") if (run.label, run.seed) == ("asp", 2) else run for run in THREE]
    assert {best.seeds for _, best in compared(*runs).best()} == {2}
    missing = replace(compared(*THREE), runs=THREE[:-1])
    assert (missing.missing, {best.seeds for _, best in missing.best()}) == (["asp"], {2})


def test_a_policy_that_did_not_reach_the_loss_is_not_fastest() -> None:
    runs = [
        learned("bsp", 0, 0.9, seconds=30.0),
        learned("asp", 0, 0.9, seconds=20.0),
        learned("ssp", 0, 0.3, seconds=5.0),
    ]
    by = {best.by: best.policy for _, best in compared(*runs).best()}
    assert by == {"held-out accuracy": "bsp", "time to the loss": "asp"}


def test_the_table_of_several_seeds_has_means_and_their_errors() -> None:
    comparison = compared(*THREE)
    header, *rows = comparison.table()
    assert [row[0] for row in rows] == ["bsp", "doll", "asp"]
    assert dict(zip(header, rows[1], strict=True))["accuracy"] == "0.95 ± 0.0115"
    assert len(comparison.table_of_runs()) == 10
    assert "doll (seed 1): samples: reached" in comparison.text()
    content = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert [row["seed"] for row in content["policies"]] == 3 * [0, 1, 2]
    assert content["seeds"] == [0, 1, 2]
    assert content["best"][0]["policy"] == "doll"
