"""The table of `benchmarks.live.mlless_filter`, from reports of runs."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from benchmarks.live import mlless_clicks, mlless_ratings
from benchmarks.live.experiment import Experiment, Options
from benchmarks.live.mlless_filter import ALL_REDUCE, Learned, Row, changes_of, claims, table
from benchmarks.live.sparse_allreduce_worker import samples_of
from doll.config import load
from doll.task.base import load_task

pytestmark = pytest.mark.slow  # loads torch


def row(significance: float, *, updates: int, pushed: int, best: float | None) -> Row:
    report = {
        "measures": {"bytes": {"pushed": pushed, "fetched": 1_000_000}}, "best_loss": best, "training_seconds": 2.5,
        "updates": updates,
    }  # fmt: skip
    return Row.of(significance, report, 0.765)


@pytest.mark.parametrize(("best", "is_reached"), [(0.765, True), (0.766, False), (None, False)])
def test_a_run_has_reached_the_loss_of_the_job_or_not(best: float | None, is_reached: bool) -> None:
    assert row(0.0, updates=1, pushed=1, best=best).is_reached == is_reached


def test_runs_are_compared_with_the_first_value() -> None:
    rows = [row(0.0, updates=100, pushed=4_000_000, best=0.76), row(0.7, updates=120, pushed=1_000_000, best=0.8)]
    first, second = table(rows).rows
    assert first == [
        "dense",
        "float32",
        "no limit",
        "0",
        "1 of 1",
        "2.5",
        "100",
        "0.7600",
        "4.0",
        "1.0",
        "5.0",
        "1.00 x",
        "0.0 %",
        "1.00 x",
    ]
    assert second == [
        "dense",
        "float32",
        "no limit",
        "0.7",
        "0 of 1",
        "2.5",
        "120",
        "0.8000",
        "1.0",
        "1.0",
        "2.0",
        "2.50 x",
        "20.0 %",
        "1.00 x",
    ]


def test_runs_of_one_seed_are_compared_with_each_other() -> None:
    rows = [
        row(0.0, updates=100, pushed=4_000_000, best=0.76), row(0.7, updates=120, pushed=1_000_000, best=0.76),
        row(0.0, updates=200, pushed=9_000_000, best=0.76), row(0.7, updates=260, pushed=3_000_000, best=None),
    ]  # fmt: skip
    [_, second] = table(rows).rows
    assert second[4] == "1 of 2"
    assert second[-3:-1] == ["2.50 ± 0.00 x", "25.0 ± 7.1 %"]


def test_kinds_of_factors_and_networks_are_compared_among_themselves() -> None:
    dense = [row(0.0, updates=100, pushed=4_000_000, best=0.76), row(0.7, updates=110, pushed=800_000, best=0.76)]
    slow = [each._replace(mbit_per_s=100.0, time_s=each.time_s * (3 - 2 * each.significance)) for each in dense]
    tables = [each._replace(model="tables", fetched_bytes=9_000_000) for each in dense]
    halves = [each._replace(contributions="bf16", pushed_bytes=each.pushed_bytes // 2) for each in dense]
    rows = [*dense, *slow, *tables, *halves]
    assert [line[0] + line[2] for line in table(rows).rows] == [
        "denseno limit", "denseno limit", "dense100", "dense100", "tablesno limit", "tablesno limit", "denseno limit",
        "denseno limit",
    ]  # fmt: skip
    assert [line[-3] for line in table(rows).rows][-2:] == ["1.00 x", "2.14 x"], "of what is rounded as well"
    verdicts = {claim.claim.split(":")[0]: claim.verdict for claim in claims(rows, mlless_ratings.LEARNED)}
    assert verdicts == {
        "PMF, dense, float32, no limit": "reproduced", "PMF, dense, float32, 100 Mbit/s": "reproduced",
        "PMF, tables, float32, no limit": "not reproduced", "PMF, dense, bf16, no limit": "not reproduced",
    }  # fmt: skip
    slower = [slow[0], slow[1]._replace(time_s=100.0)]
    assert claims(slower, mlless_ratings.LEARNED)[0].verdict == "not reproduced"


def test_a_task_that_gains_little_is_judged_by_that() -> None:
    rows = [row(0.0, updates=100, pushed=4_000_000, best=0.76), row(0.7, updates=120, pushed=3_000_000, best=0.76)]
    [claim] = claims(rows, mlless_clicks.LEARNED)
    assert claim.verdict == "reproduced"
    [claim] = claims([rows[0], rows[1]._replace(time_s=1.0)], mlless_clicks.LEARNED)
    assert claim.verdict == "not reproduced"


@pytest.mark.parametrize(("model", "why"), [("dense", "the way over the server"), ("tables", "asks for its rows")])
def test_the_filter_is_compared_with_the_all_reduce_on_the_same_links(model: str, why: str) -> None:
    mine = row(0.7, updates=100, pushed=4_000_000, best=0.76)._replace(model=model, mbit_per_s=100.0)
    other = mine._replace(significance=0.0, model=ALL_REDUCE, time_s=2.0)
    [claim] = claims([mine, other], mlless_ratings.LEARNED)
    assert claim.verdict == "not reproduced"
    assert why in claim.why
    [claim] = claims([mine, other._replace(time_s=3.0)], mlless_ratings.LEARNED)
    assert claim.verdict == "reproduced"
    assert claims([mine, other._replace(mbit_per_s=1000.0)], mlless_ratings.LEARNED) == []
    assert table([mine, other]).rows[1][4:6] == ["1 of 1", "2.0"], "it has no v"


LINES = {
    "movielens_1m/ratings.csv.gz": "user,item,rating\n"
    + "".join(f"{user},{user % 7 + 1},3\n" for user in range(1, 200)),
    "criteo_sample/train.tsv.gz": ("1" + "\t5" * 13 + "\tff" * 26 + "\n") * 200,
    "criteo_sample/dev.tsv.gz": "0" + "\t" * 39 + "\n",
}


@pytest.mark.parametrize("module", [mlless_ratings, mlless_clicks])
@pytest.mark.parametrize("model", ["dense", "tables"])
def test_both_tasks_have_their_job_and_the_all_reduce_their_samples(module: Any, model: str, tmp_path: Path) -> None:
    for name, text in LINES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    learned: Learned = module.LEARNED
    options = Options(tmp_path, settings=Experiment.of(module).settings)
    config = load(learned.job, [*changes_of(learned, options, model), "training.policy={name: isp, significance: 0.7}"])
    assert (config.data.workers, config.data.batch_size) == (4, int(module.SETTINGS["batch_size"]))
    assert config.training.reduction == "mean"
    assert config.stop.loss is not None
    task = load_task(config)
    x, y = samples_of(config, task)
    assert 150 < len(x) == len(y) <= 200
    assert x.shape[1:] == task.input_shape
    assert len(list(task.holdout())) > 0
