"""The price tables that ship with DOLL, what a plan and a report take from them, and what runs beside the workers."""

from __future__ import annotations

import re

import pytest
from doll.config import PlanConfig, load
from doll.errors import ConfigError
from doll.provisioner.prices.shipped import (
    PARTS,
    StackKind,
    ec2_estimate,
    shipped_price,
    shipped_prices,
    stack_lines,
    stack_usd_per_h,
    with_prices,
)
from paths import EXAMPLES, ROOT

DIGITS = EXAMPLES / "digits" / "job.yaml"


def test_spot_is_cheaper_in_every_region_and_the_tables_agree() -> None:
    for region in ("us-east-1", "eu-west-1", "ap-south-1"):
        for instance in ("c5.xlarge", "c7g.large", "c7g.xlarge", "c7i.xlarge"):
            price = shipped_price(instance, region)
            assert 0 < price.spot_usd_per_h < price.on_demand_usd_per_h < 1
            # Two sources of two dates round differently.
            assert shipped_prices(region)[instance].usd_per_h == pytest.approx(price.on_demand_usd_per_h, rel=0.01)


def test_a_machine_that_the_table_lacks_is_refused_with_what_it_has() -> None:
    with pytest.raises(
        ConfigError, match=r"m9\.huge in us-east-1: expected one of .*c7g\.large.* in .*eu-west-1.*--spot"
    ):
        shipped_price("m9.huge", "us-east-1")
    with pytest.raises(ConfigError, match=r"c7g\.large in mars-1"):
        with_prices(None, PlanConfig(), "c7g.large", "mars-1", [])


def test_prices_that_are_stated_count_unless_a_machine_is_asked_for() -> None:
    notes: list[str] = []
    both = PlanConfig(spot_usd_per_h=0.1, on_demand_usd_per_h=0.3)
    assert with_prices(None, both, None, None, notes) is both
    assert notes == []
    one = with_prices(None, PlanConfig(spot_usd_per_h=0.01), None, None, notes)
    assert (one.spot_usd_per_h, one.on_demand_usd_per_h) == (0.01, 0.0725)
    assert notes[0].startswith("0.0725 USD/h on-demand: c7g.large in us-east-1, prices of early 2026")
    asked = with_prices(None, both, None, "eu-west-1", notes)
    assert (asked.spot_usd_per_h, asked.on_demand_usd_per_h) == (0.0407, 0.0775)


def test_an_ec2_fleet_names_the_machine() -> None:
    fleet = (
        "{kind: ec2, region: eu-central-1, launch_template: doll, launch_template_version: 1, "
        "subnets: [subnet-01234567], instance_types: [%s]}"
    )
    config = load(DIGITS, [f"fleet={fleet % 'c5a.xlarge, c7i.xlarge, c7g.xlarge'}", "control.kind=auto"])
    assert with_prices(config, config.plan, None, None, []).on_demand_usd_per_h == 0.2037
    assert (ec2_estimate(config, 3600.0) or {})["instance"] == "c7i.xlarge"
    unknown = load(DIGITS, [f"fleet={fleet % 'x9.large'}", "control.kind=auto"])
    assert ec2_estimate(unknown, 3600.0) is None, "a report is not refused for it"


def test_an_hour_of_four_workers_costs_four_prices() -> None:
    hour = ec2_estimate(load(DIGITS), 3600.0)
    assert hour is not None
    assert hour["machines"] == 4
    assert hour["on_demand_usd"] == pytest.approx(4 * 0.0725)
    assert hour["spot_usd"] == pytest.approx(4 * shipped_price("c7g.large", "us-east-1").spot_usd_per_h)
    gangs = ec2_estimate(load(DIGITS, ["plan.machines_per_worker=3"]), 3600.0)
    assert gangs is not None
    assert gangs["machines"] == 12


@pytest.mark.parametrize("kind", ["self_managed", "msk"])
def test_what_runs_beside_the_workers_is_what_terraforms_page_says(kind: StackKind) -> None:
    page = (ROOT / "deploy" / "terraform" / "README.md").read_text()
    (total,) = re.findall(rf"before the first worker: `{kind}`, one NAT\*\* \| \*\*([\d.]+)\*\*", page)
    assert f"{stack_usd_per_h(kind):.2f}" == total
    costs = page[page.index("## Costs") : page.index("## Test coverage")]
    for part in PARTS[kind]:
        assert f"| {part.usd_per_h:.2f}" in costs, part


def test_each_part_has_a_line_and_the_last_has_the_sum() -> None:
    lines = stack_lines("self_managed", 7200.0, 10.0)
    assert len(lines) == 2 + len(PARTS["self_managed"])
    assert "for 2:00:00 h" in lines[0]
    assert re.search(r"Kafka on three machines +0\.17 USD/h +0\.34 USD", "\n".join(lines))
    assert lines[-1].endswith("0.45 USD/h      0.90 USD; with the workers 10.90 USD")
