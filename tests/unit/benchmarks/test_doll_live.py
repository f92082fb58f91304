"""The tables and claims of DOLL's live experiments, from rows of runs; and their market."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.live import doll_emnist, doll_mix, doll_prices
from benchmarks.live.price_replay import POLICIES, Runs, ToTheLetter
from benchmarks.paper.setting import N
from doll.provisioner.traces.model import Pool, Series, constant
from doll.provisioner.traces.recordings import pool_of

from doll_lab.backtests.baselines import AllOnDemand, AllSpot

DAY_S = 86_400.0


def a_pool(prices: list[float], on_demand: float = 0.27) -> Pool:
    """Prices that change every day."""
    times = np.arange(len(prices) + 1, dtype=np.float64) * DAY_S
    price = Series(times, np.array([*prices, prices[-1]]))
    return Pool(doll_mix.POOL, N, on_demand, price, constant(float(N), 0.0, times[-1]))


def curve(accuracy: list[float], seed: int = 0) -> doll_emnist.Curve:
    count = len(accuracy)
    seconds, samples = [10.0 * (n + 1) for n in range(count)], [1000.0 * (n + 1) for n in range(count)]
    return doll_emnist.Curve(seed, 50, 0, 0, seconds, samples, accuracy)


def test_a_curve_is_read_from_the_tables_of_its_run_folder(tmp_path: Path) -> None:
    (tmp_path / "updates.csv").write_text(
        "time_s,version,samples_total,void\n100,1,96,0\n102,2,192,1\n103,2,190,0\n105,3,288,0\n"
    )
    (tmp_path / "evaluations.csv").write_text(
        "time_s,version,accuracy,void\n90,0,0.02,0\n103.5,2,0.4,0\n104,9,0.9,1\n106,3,0.6,0\n"
    )
    report = {"updates": 3, "audit": {"missing": 0, "duplicate": 1}}
    read = doll_emnist.Curve.of(7, tmp_path, report)
    assert (read.seed, read.updates, read.missing, read.twice) == (7, 3, 0, 1)
    assert (read.seconds, read.samples, read.accuracy) == ([3.5, 6.0], [190.0, 288.0], [0.4, 0.6])


def test_one_lucky_evaluation_does_not_reproduce_the_accuracy() -> None:
    lucky = curve([0.5, 0.7, 0.86, 0.8, 0.8, 0.81, 0.81, 0.8])
    assert lucky.reached(0.85) == (30.0, 3000.0)
    [claim] = doll_emnist.claims([lucky])
    assert claim.verdict == "cannot be tried here"
    assert "1 of 1 runs passed 85 %" in claim.ours
    [claim] = doll_emnist.claims([curve([0.5, 0.86, 0.86, 0.84, 0.86, 0.86])])
    assert claim.verdict == "reproduced"


def test_the_table_of_curves_says_who_did_not_reach_it() -> None:
    first, second, mean = doll_emnist.table([curve([0.5, 0.82, 0.86]), curve([0.5, 0.7, 0.8], seed=1)]).rows
    assert first[4:8] == ["20.0", "2,000", "30.0", "3,000"]
    assert second[4:8] == ["30.0", "3,000", "not", "not"]
    assert mean[4] == "25.0 ± 7.1"
    assert mean[6] == "30.0 (1 of 2)"


def test_runs_of_a_seed_are_the_same_and_zones_take_turns() -> None:
    cheap, dear = a_pool([0.1] * 90), a_pool([0.2] * 90)
    runs, again = (Runs.draw([cheap, dear], (0, 1, 2), 0.9, equal=False) for _ in range(2))
    assert (runs.up == again.up).all()
    assert (runs.rates_per_s == again.rates_per_s).all()
    assert runs.mean_price.tolist() == pytest.approx([0.1, 0.2, 0.1])
    assert runs.up.mean() == pytest.approx(0.9, abs=0.01)


def test_costs_are_relative_to_all_on_demand() -> None:
    runs = Runs.draw([a_pool([0.135] * 90)], (0, 1), 0.9, equal=True)
    cost, runtime = runs.of(AllOnDemand())
    assert cost.tolist() == pytest.approx([1.0, 1.0])
    assert runtime.tolist() == pytest.approx([1.0, 1.0])
    cost, runtime = runs.of(AllSpot())
    assert cost.tolist() == pytest.approx([0.5, 0.5])  # the same machine-hours at half the price
    assert runtime.mean() == pytest.approx(1 / 0.9, rel=0.02)


def test_more_deviation_keeps_the_mean_of_a_price_within_its_bounds() -> None:
    runs = Runs.draw([a_pool([0.16, 0.17] * 45)], (0,), 0.9, equal=True)
    assert (runs.with_gain(1.0).price == runs.price).all()
    varied = runs.with_gain(4.0).price
    assert varied.mean() == pytest.approx(runs.price.mean())
    assert varied.std() == pytest.approx(4 * runs.price.std())
    assert 0.0 <= runs.with_gain(1e6).price.min() <= runs.with_gain(1e6).price.max() <= 0.27


def test_to_the_letter_plans_again_only_where_the_price_changes() -> None:
    still, moving = (
        Runs.draw([a_pool(prices)], (0, 1), 0.9, equal=True) for prices in ([0.16] * 90, [0.16, 0.161] * 45)
    )
    cost, runtime = still.of(ToTheLetter(1.05))
    all_spot, late = still.of(AllSpot())
    assert (cost == all_spot).all()
    assert (runtime == late).all()
    assert runtime.min() > 1.05
    _, runtime = moving.of(ToTheLetter(1.05))
    assert runtime.max() < 1.052


def test_where_a_sweep_reaches_15_percent() -> None:
    name = next(iter(POLICIES))
    needs = [doll_prices.Need("deadline", value, "", {name: [saved]}) for value, saved in ((1.0, 5.0), (1.1, 25.0))]
    assert doll_prices.crossing(needs, "deadline", name) == pytest.approx(1.05)
    assert doll_prices.crossing(needs[:1], "deadline", name) is None
    assert doll_prices.crossing(needs, "price", name) is None


def test_the_written_trace_has_the_prices_and_the_availability_that_was_asked_for(tmp_path: Path) -> None:
    pool = a_pool([0.16, 0.17] * 45)
    doll_mix.write_trace(tmp_path / "trace", pool, 3)
    read = pool_of(tmp_path / "trace", None, "the test")
    assert (read.price.values == pool.price.values).all()
    assert read.num_machines == doll_mix.WORKERS
    assert read.alpha == pytest.approx(doll_mix.ALPHA, abs=0.05)
    assert read.cycle_s == pytest.approx(doll_mix.CYCLE_S * doll_mix.SPEED_UP, rel=0.15)


def test_a_rule_that_saves_nothing_of_the_mix_is_not_a_reproduction() -> None:
    def row(rule: str, seed: int, cost: float) -> doll_mix.Row:
        return doll_mix.Row(rule, seed, 3, cost, cost, 1.1, False, 2, 1, 0.7, 0, 0)

    rows = [row("mix", 0, 0.8), row("theorem", 0, 0.8), row("pace", 0, 0.6), row("pace", 1, 0.9)]
    theorem, pace = doll_mix.claims(rows)
    assert (theorem.verdict, pace.verdict) == ("not reproduced", "reproduced")
    assert pace.ours.startswith("25.0;"), "the run without a mix of its seed does not count"
