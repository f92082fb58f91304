"""A policy learns with its defaults what the best one learns, or as `doll.config.step_size.advice` says."""

from __future__ import annotations

import pytest
from benchmarks import policies
from benchmarks.policies import ADVISED, POINTS, POLICIES, TASKS, Row, behind, means, measure, runs, text
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
    lacks = behind(means(measured)[task])
    far = {name: lack for name, lack in lacks.items() if lack > POINTS and name + ADVISED not in lacks}
    assert far == {}


def _row(policy: str, score: float, seed: int = 0) -> Row:
    return Row("digits", policy, seed, score, 0.5, 20_000, 156, 176.0, 1_000_000, 0.05, None)


def test_the_table_marks_what_is_far_behind_the_best() -> None:
    rows = [_row("bsp", 0.94), _row("bsp", 0.96, 1), _row("asp", 0.91), _row("asp" + ADVISED, 0.93)]
    shown = text(rows, "abc1234")
    assert "| `bsp` | 95.0 (2.0) | 0.0 | 176 | 1 | 0.0500 | 2 |" in shown
    assert "| `asp` | 91.0 (0.0) | **4.0** |" in shown
    assert "| `asp` as advised | 93.0 (0.0) | 2.0 |" in shown


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
