"""A spot run before anything starts: its market, its plan and its predictions."""

from __future__ import annotations

from pathlib import Path

import pytest
from doll import config as job_config
from doll.errors import ConfigError
from paths import EXAMPLES

from doll_lab.spot.preparation import SpotRun
from doll_lab.spot.spot_prediction import predict

EXAMPLE = EXAMPLES / "digits" / "market.yaml"


def spot_run(*overrides: str, seed: int = 0) -> SpotRun:
    return SpotRun.of(job_config.load(EXAMPLE, list(overrides)), seed)


def test_a_trace_brings_its_own_prices_and_availability(tmp_path: Path) -> None:
    (tmp_path / "pools.csv").write_text("trace_set,pool,num_machines,on_demand_usd_per_hour\nmine,one,4,0.4\n")
    (tmp_path / "prices.csv").write_text("pool,seconds,usd_per_hour\none,0,0.1\none,5000,0.2\none,10000,0.2\n")
    (tmp_path / "availability.csv").write_text("pool,seconds,num_up\none,0,4\none,7500,2\none,10000,2\n")
    built = spot_run(f"fleet.trace={tmp_path}")
    assert built.market.name == "one"
    assert built.market.alpha == pytest.approx(0.875)
    assert built.assessment.request.prices.on_demand_usd_per_h == pytest.approx(0.4 * 12)
    assert built.assessment.request.prices.spot_usd_per_h == pytest.approx(0.15 * 12)
    with pytest.raises(ConfigError, match=r"fleet\.pool: expected one of one; got two"):
        spot_run(f"fleet.trace={tmp_path}", "fleet.pool=two")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stop={accuracy: 0.9}", "stop.updates"),
        ("plan.deadline_s=null", "plan.deadline_s"),
        ("fleet={kind: compose}", "expected processes"),
        ("source=null", "source: expected one"),
        ("plan.spot_usd_per_h=null", "plan.spot_usd_per_h"),
    ],
)
def test_what_a_market_needs_is_asked_for(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spot_run(override)


def test_queueing_streams_get_a_note() -> None:
    assert not any("while_down" in note for note in spot_run().notes)
    assert any("queue" in note for note in spot_run("arrivals.while_down=queue").notes)


def test_a_prediction_meets_the_deadline_at_no_more_than_on_demand() -> None:
    for seed in range(3):
        built = spot_run(seed=seed)
        planned, spot = built.predicted, built.predictions["all-spot"]
        assert planned.finish_s <= built.planner.deadline_s
        assert planned.cost_usd < built.predictions["on-demand"].cost_usd
        assert spot.moves == 0
        assert spot.preemptions > 0


def test_tries_on_spot_leave_launches_for_those_who_go_on_demand() -> None:
    """In a minute six slots that wait for spot try 360 times: at 120 a minute, nobody could be covered in time."""
    limits = spot_run().settings.limits
    tries = 60 / limits.retry_s * spot_run().settings.num_slots
    assert min(limits.launches_per_min, limits.fallbacks_per_min) > 10 * tries


def test_the_time_of_a_notice_is_billed() -> None:
    with_notice, without_notice = spot_run("fleet.no_notice_share=0"), spot_run("fleet.no_notice_share=1")
    rates = with_notice.settings.rates_per_s

    def usd(of: SpotRun, leave_s: float) -> float:
        return predict(of.market, of.planner, rates, leave_s=leave_s).cost_usd

    price = with_notice.market.spot_usd_per_h(0.0) / 3600
    assert usd(with_notice, 2.0) - usd(with_notice, 0.0) == pytest.approx(
        with_notice.predicted.preemptions * 2.0 * price
    )
    assert usd(with_notice, 60.0) == usd(with_notice, with_notice.market.notice_s)  # then it is killed
    assert usd(without_notice, 2.0) == usd(without_notice, 0.0)
