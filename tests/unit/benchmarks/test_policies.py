"""A policy learns with its defaults what the best one learns, or as `doll.config.step_size.advice` says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks import policies
from benchmarks.policies import ADVISED, POLICIES, TASKS, Row, behind, measure, runs, text
from fuzzing import ALL_EXAMPLES

pytestmark = pytest.mark.slow  # trains models

SOME = ("bsp", "ssp", "wsp")  # `make test` has these on digits, `make test-all` all on each task
EXPECTED = [(task, tuple(POLICIES)) for task in TASKS] if ALL_EXAMPLES else [("digits", SOME)]


@pytest.mark.parametrize(("task", "names"), EXPECTED)
def test_who_changes_the_policy_alone_is_not_punished(task: str, names: tuple[str, ...]) -> None:
    data = TASKS[task].data
    if data is not None and not data.exists():
        pytest.skip(f"no {data}")
    measured = [measure(run) for run in runs([task], names, seeds=1)]
    lacks = behind(measured)
    far = {name: lack for name, lack in lacks.items() if lack.is_far and name + ADVISED not in lacks}
    assert far == {}


def _row(policy: str, score: float, seed: int = 0) -> Row:
    return Row("digits", policy, seed, score, 0.5, 20_000, 156, 176.0, 1_000_000, 0.05, None, "abc1234")


def test_the_table_marks_what_is_far_behind_the_best() -> None:
    seeds = [_row("bsp", 0.94), _row("bsp", 0.96, 1), _row("asp", 0.89), _row("asp", 0.91, 1)]
    shown = text([*seeds, _row("asp" + ADVISED, 0.93), _row("asp" + ADVISED, 0.95, 1)])
    assert "**digits** (accuracy, %; commit abc1234)" in shown
    assert "| `bsp` | 95.0 (2.0) | 0.0 ± 0.0 | 176 | 1 | 0.0500 | 2 |" in shown
    assert "| `asp` | 90.0 (2.0) | **5.0** ± 0.0 |" in shown
    assert "| `asp` as advised | 94.0 (2.0) | 1.0 ± 0.0 |" in shown
    assert "| `asp` | 90.0 (0.0) | **5.0** |" in text([_row("bsp", 0.95), _row("asp", 0.9)])


def test_a_difference_counts_if_it_is_beyond_its_error() -> None:
    rows = [_row("bsp", 0.9, seed) for seed in range(3)]
    noisy = [_row("asp", score, seed) for seed, score in enumerate((0.9, 0.88, 0.80))]
    steady = [_row("ssp", score, seed) for seed, score in enumerate((0.86, 0.86, 0.87))]
    lacks = behind([*rows, *noisy, *steady])
    assert lacks["asp"].mean == pytest.approx(0.04)
    assert not lacks["asp"].is_far
    assert lacks["ssp"].mean == pytest.approx(0.0367, abs=1e-4)
    assert lacks["ssp"].is_far


def test_seeds_do_not_reduce_the_error_of_the_versions_of_one_stream() -> None:
    behind_by_4 = [replace(_row("wsp", 0.86, seed), error=0.02) for seed in range(3)]
    lack = behind([*(_row("bsp", 0.9, seed) for seed in range(3)), *behind_by_4])["wsp"]
    assert lack.error == pytest.approx(0.02)
    assert not lack.is_far


def test_luck_at_one_seed_makes_no_policy_the_best() -> None:
    """At each seed another of many equal policies is lucky: none is behind, though the best one at a seed leads by 10
    points."""
    rows = [_row(f"p{policy}", 0.9 if policy == seed else 0.8, seed) for policy in range(5) for seed in range(5)]
    lacks = behind(rows)
    assert all(lack.mean <= 0.0 + 1e-9 for lack in lacks.values())


def test_a_job_that_follows_the_advice_gets_none() -> None:
    from doll.config.step_size import advice

    run = policies.Run("digits", "asp", 0)
    said = advice(policies.job_of(run))
    assert said is not None
    assert "training.policy.contribution=step training.optimizer.nesterov=true" in said
    assert advice(policies.job_of(run._replace(advised=True))) is None


def test_a_schedule_is_stretched_to_the_updates_of_the_policy() -> None:
    plain, advised = (policies.job_of(policies.Run("transformer", "ssp", 0, advised=flag)) for flag in (False, True))
    assert [part.updates for part in plain.training.schedule] == [40, None]
    assert [part.updates for part in advised.training.schedule] == [160, None]
    assert advised.training.schedule[1].args["T_max"] == 4 * plain.training.schedule[1].args["T_max"]
    assert advised.training.ema is not None
    assert advised.training.ema.decay**4 == pytest.approx(0.98)
