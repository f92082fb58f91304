"""One plan over several regions: what traffic costs, where slots go, and when a move pays."""

from __future__ import annotations

import json

import numpy as np
import pytest
from doll.cli.app import app
from doll.config.policy import policy_section
from doll.provisioner.planning.regions import (
    NOWHERE,
    LifetimeEstimator,
    Region,
    RegionCosts,
    SpotRegions,
    Traffic,
    moves_that_pay,
    plan_regions,
    policy_traffic,
)
from doll.provisioner.planning.state import Alpha, PlannerSettings, PlannerState
from doll.theory.cost import Prices
from typer.testing import CliRunner

HOUR_S = 3600.0
SETTINGS = PlannerSettings(samples=4 * 8 * HOUR_S, batch_size=1, deadline_s=12 * HOUR_S, boot_s=180.0)


def spot(
    usd: list[float], up: list[int], *, slots: int = 4, life_h: float = 4.0, start_usd: float = 0.0
) -> SpotRegions:
    """Regions with these prices, in which all slots have a machine or none has one."""
    shape = (len(usd), slots)
    return SpotRegions(
        usd_per_h=np.broadcast_to(np.array(usd)[:, None], shape).copy(),
        available=np.broadcast_to(np.array(up, dtype=np.bool_)[:, None], shape).copy(),
        start_usd=np.full(len(usd), start_usd), life_s=np.full(len(usd), life_h * HOUR_S),
    )  # fmt: skip


def state(at_h: float = 1.0, done_h: float = 0.9, *, on_spot: bool = True, up: bool = True) -> PlannerState:
    """Four slots with one sample per second each."""
    return PlannerState(
        elapsed_s=at_h * HOUR_S, samples_done=4 * done_h * HOUR_S, rates_per_s=np.ones(4),
        on_spot=np.full(4, on_spot), up=np.full(4, up), alpha=Alpha(0.9), prices=Prices(0.0, 1.0),
    )  # fmt: skip


def test_a_policy_that_sends_rarely_costs_little_away_from_home() -> None:
    def back(name: str, **keys: float) -> float:
        section = policy_section(name).model_validate({"name": name, **keys})
        return policy_traffic(section, model_bytes=4e6, batch_size=100, num_workers=8, record_bytes=50).back_bytes

    assert back("doll") == pytest.approx(40_000)
    assert back("diloco", local_batches=100) == pytest.approx(400)
    assert back("diloco", local_batches=100, density=0.1) < 400


def test_traffic_is_billed_where_it_leaves_a_region() -> None:
    home, far = Region("home", Prices(0.1, 0.3), 0.02), Region("far", Prices(0.05, 0.3), 0.09)
    traffic = Traffic(out_bytes=1000, back_bytes=100, start_bytes=5e9)
    assert far.egress_usd_per_h(home, traffic, 1000.0) == pytest.approx(3.6 * 0.02 + 0.36 * 0.09)
    assert far.start_usd(home, traffic) == pytest.approx(0.1)
    assert home.egress_usd_per_h(home, traffic, 1000.0) == home.start_usd(home, traffic) == 0.0
    costs = RegionCosts((home, far), traffic, 1000.0, "doll")
    assert (costs.spot, costs.on_demand) == (0, 0)
    assert RegionCosts((home, far), traffic, 1.0, "diloco").spot == 1
    with pytest.raises(ValueError, match="egress_usd_per_gb"):
        Region("home", Prices(0.1, 0.3), -1.0)


def test_the_first_plan_puts_slots_where_spot_is_cheapest() -> None:
    nowhere = np.full(4, NOWHERE)
    chosen = plan_regions(state(0.0, 0.0), SETTINGS, spot([0.5, 0.2, 0.1], [1, 1, 0]), nowhere, first=True)
    assert chosen.on_spot.all()
    assert chosen.region.tolist() == [1] * 4


def test_a_lost_machine_is_replaced_elsewhere_and_waits_if_no_region_is_cheaper_than_on_demand() -> None:
    lost = plan_regions(state(up=False), SETTINGS, spot([0.2, 0.4], [0, 1]), np.zeros(4, np.int64))
    assert lost.region.tolist() == [1] * 4
    dear = plan_regions(state(up=False), SETTINGS, spot([0.2, 1.4], [0, 1]), np.zeros(4, np.int64))
    assert dear.on_spot.all()
    assert dear.region.tolist() == [NOWHERE] * 4


def test_without_slack_the_slots_go_on_demand_as_in_one_region() -> None:
    late = plan_regions(state(4.1, 0.1, up=False), SETTINGS, spot([0.2, 0.4], [0, 1]), np.zeros(4, np.int64))
    assert not late.on_spot.any()
    assert late.region.tolist() == [NOWHERE] * 4


def test_a_move_is_made_only_if_it_pays_for_its_boot_and_its_traffic() -> None:
    there = np.zeros(4, np.int64)
    # 0.1 USD/h for 4 hours against a boot of 3 minutes at 0.4 USD/h.
    assert moves_that_pay(spot([0.5, 0.4], [1, 1]), there, 180.0, 8 * HOUR_S).tolist() == [1] * 4
    for regions, left_h in (
        (spot([0.5, 0.4], [1, 1], start_usd=0.5), 8.0),
        (spot([0.5, 0.4], [1, 1], life_h=0.1), 8.0),
        (spot([0.5, 0.4], [1, 1]), 0.1),
        (spot([0.5, 0.4], [1, 0]), 8.0),
    ):
        assert moves_that_pay(regions, there, 180.0, left_h * HOUR_S).tolist() == [NOWHERE] * 4
    assert plan_regions(state(), SETTINGS, spot([0.5, 0.4], [1, 1]), there).region.tolist() == [1] * 4


def test_moves_that_pay_leave_the_slack_of_the_guard() -> None:
    """Each move loses a boot: with little slack, slots stay where they are."""
    there = np.zeros(4, np.int64)
    tight = state(4.0, 0.1)  # 360 s of slack, before the margin
    chosen = plan_regions(tight, SETTINGS, spot([0.5, 0.4], [1, 1]), there)
    assert set(chosen.region.tolist()) <= {0, NOWHERE}


def test_lifetimes_are_those_of_machines_that_were_interrupted() -> None:
    lives = LifetimeEstimator(2, prior_s=HOUR_S)
    steady, flickering = np.ones((1, 4), np.bool_), np.ones((1, 4), np.bool_)
    for tick in range(40):
        lives.observe(np.concatenate([steady, flickering & (tick % 2 == 0)]), 600.0)
    assert lives.life_s[0] == pytest.approx(HOUR_S + 39 * 600.0)
    assert lives.life_s[1] < 600.0


PLAN = ["plan", "-N", "4", "--rate", "100", "-K", "4", "-b", "100", "-J", "20000", "--alpha", "0.9", "--model-mb", "1",
        "--also-in"]  # fmt: skip


def test_doll_plan_names_the_prices_and_the_traffic_of_each_region() -> None:
    result = CliRunner().invoke(app, [*PLAN, "eu-north-1", "--egress", "0"])
    assert result.exit_code == 0, result.output
    assert "cheapest with traffic: spot in eu-north-1" in result.output
    assert "more than 7 days old" in result.output
    costly = CliRunner().invoke(app, [*PLAN, "eu-north-1", "--json"])
    regions = json.loads(costly.stdout)["regions"]
    assert regions["spot"] == "us-east-1"
    assert regions["regions"][1]["egress_usd_per_h"] == pytest.approx(2 * 10_000 * 100 * 3600 / 1e9 * 0.02)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["mars-1"], "has no prices of c7g.large in mars-1"),
        (["eu-north-1=z9.tiny"], "has no prices of z9.tiny in eu-north-1"),
        (["us-east-1"], "not named twice"),
        (["eu-north-1", "--spot-price", "1"], "got some of both"),
        (["eu-north-1", "--price-table", "/no/such.csv"], "--price-table: cannot read"),
    ],
)
def test_wrong_regions_are_refused_with_one_line(arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(app, [*PLAN, *arguments])
    assert result.exit_code == 2
    assert expected in " ".join(result.output.replace("│", " ").split())


def test_options_of_regions_need_a_region() -> None:
    result = CliRunner().invoke(app, ["plan", "-N", "4", "--rate", "100", "-J", "9", "--egress", "0.1"])
    assert result.exit_code == 2
    assert "expected --also-in REGION" in " ".join(result.output.replace("│", " ").split())
