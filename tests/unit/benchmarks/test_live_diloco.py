"""What `benchmarks.live.diloco` makes of runs: bytes to a loss, shares, verdicts; and which jobs faults can hit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.faults import job_of, samples_in
from benchmarks.live.diloco import SETTINGS_OF_POLICIES, Run, bytes_table, claims, crossing, shares, slow_claims
from benchmarks.live.experiment import JOBS
from doll.config.policy import POLICIES

pytestmark = pytest.mark.slow  # loads torch


def run(
    label: str, sent_mb: Sequence[float], losses: Sequence[float], *, lr: float = 0.1, seed: int = 0,
    mbit_per_s: float | None = None, seconds: float = 10.0,
) -> Run:  # fmt: skip
    sent = [mb * 1e6 for mb in sent_mb]
    return Run(label, lr, seed, mbit_per_s, seconds, 1000, 5, 1, 2, list(range(len(losses))), sent, losses)


@pytest.mark.parametrize(
    ("target", "x"), [(5.0, 10.0), (4.0, 10.0), (3.0, 15.0), (2.0, 20.0), (1.5, 36.0), (0.9, math.inf)]
)
def test_a_loss_is_reached_on_the_line_between_two_evaluations(target: float, x: float) -> None:
    assert crossing([10.0, 20.0, 30.0, 40.0], [4.0, 2.0, 2.4, 0.9 + 1e-9], target) == pytest.approx(x)


def test_shares_are_of_the_fewest_bytes_of_doll_at_any_step_size_with_the_same_seed() -> None:
    runs = [
        run("doll", [0, 100], [2.0, 0.5], lr=0.1), run("doll", [0, 60], [2.0, 0.5], lr=0.2),
        run("doll", [0, 200], [2.0, 0.5], lr=0.1, seed=1), run("doll", [0, 300], [2.0, 1.5], lr=0.2, seed=1),
        run("diloco, a", [0, 6], [2.0, 0.5]), run("diloco, a", [0, 10], [2.0, 0.5], seed=1),
        run("diloco, b", [0, 6], [2.0, 1.5]),
    ]  # fmt: skip
    by_kind = shares(runs, 1.0)
    assert by_kind["diloco, a", 0.1] == pytest.approx([0.1, 0.05])
    assert by_kind["diloco, b", 0.1] == [math.inf]
    assert by_kind["doll", 0.2] == pytest.approx([1.0, math.inf])
    assert shares(runs, 0.1) == {}, "doll has not reached it"
    assert bytes_table(runs).rows[1][3] == "40.0 (1 of 2)"


def test_a_share_above_a_tenth_at_any_loss_is_not_the_bar() -> None:
    doll = run("doll", [0, 100, 200], [2.0, 1.0, 0.5])
    [good] = claims([doll, run("diloco, a", [0, 9, 18], [2.0, 1.0, 0.5])])
    assert good.verdict == "reproduced"
    [best] = claims([doll, good_run := run("diloco, a", [0, 9, 18], [2.0, 1.0, 0.5], lr=0.2),
                     run("diloco, a", [0, 9, 18], [2.0, 1.0, 0.9], lr=0.3)])  # fmt: skip
    assert f"step size {good_run.lr:g}" in best.claim, "the step size that reaches all"
    [late] = claims([doll, run("diloco, a", [0, 9, 25], [2.0, 1.0, 0.5])])
    assert (late.verdict, late.why) == (
        "not reproduced", "more than a tenth, or not reached by all seeds, to 0.8, 0.7, 0.6, 0.55",
    )  # fmt: skip
    [short] = claims([doll, run("diloco, a", [0, 9, 10], [2.0, 1.0, 0.65])])
    assert short.why.endswith("to 0.6, 0.55")


def test_on_a_slow_network_samples_per_second_decide() -> None:
    doll, faster = (
        run(label, [0], [1.0], mbit_per_s=10, seconds=seconds) for label, seconds in (("doll", 20.0), ("diloco", 5.0))
    )
    [claim] = slow_claims([doll, faster])
    assert (claim.verdict, claim.ours) == ("reproduced", "200 samples/s, doll 50")
    [claim] = slow_claims([run("doll", [0], [1.0], mbit_per_s=10, seconds=5.0), faster])
    assert claim.verdict == "not reproduced"
    assert slow_claims([doll]) == []


def test_the_step_sizes_of_the_tables_are_of_the_grids() -> None:
    assert all(set(setting.lrs) <= set(setting.grid) for setting in SETTINGS_OF_POLICIES)


@pytest.mark.parametrize("policy", [None, *POLICIES.built_in])
def test_faults_can_hit_a_job_of_each_policy(policy: str | None) -> None:
    job = job_of(JOBS / "digits" / "job.yaml", asap=True, policy=policy, changes=["data.batch_size=16"])
    assert (job.training.policy.name, job.arrivals.process, job.data.batch_size) == (policy or "doll", "asap", 16)


def test_samples_of_an_update_count_over_the_time_since_the_one_before(tmp_path: Path) -> None:
    rows = ["time_s,n_samples,void", "100,50,0", "104,400,0", "105,999,1", "108,400,0", "112,200,0"]
    (tmp_path / "updates.csv").write_text("\n".join(rows))
    assert samples_in(tmp_path / "updates.csv", 0, 12) == pytest.approx(1000)
    assert samples_in(tmp_path / "updates.csv", 2, 8) == pytest.approx(200 + 400 + 100)
    with pytest.raises(ValueError, match=r"until 12\.5 s"):  # the run was shorter than what is measured of it
        samples_in(tmp_path / "updates.csv", 2, 10.5)
