"""The price tables that ship with DOLL, what a plan and a report take from them, and what runs beside the workers."""

from __future__ import annotations

import re

import pytest
from doll.config import PlanConfig, load
from doll.config.provision import ServicesConfig
from doll.errors import ConfigError
from doll.provisioner.prices.shipped import (
    PARTS,
    StackKind,
    cold_starts,
    cost_lines,
    ec2_estimate,
    service_costs,
    shipped_price,
    shipped_prices,
    stack_usd_per_h,
    sum_of,
    with_prices,
)
from doll.theory.cost import Prices
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


def test_each_cost_has_a_line_with_its_source_and_the_last_has_the_sum() -> None:
    costs = [
        *service_costs("self_managed", ServicesConfig(egress_gb_per_h=2.0), 7200.0),
        cold_starts(3, 1, 7200.0, boot_s=90.0, cycle_s=7200.0, prices=Prices(0.1, 0.4)),
    ]
    lines = cost_lines("Costs", 10.0, costs)
    assert len(lines) == 3 + len(costs)
    text = "\n".join(lines)
    assert re.search(r"Kafka on three machines +0\.34 USD +0\.17 USD/h, table", text)
    assert re.search(r"egress +0\.36 USD +2 GB/h x 0\.09 USD/GB, table", text)
    assert re.search(r"storage +- USD +not priced: set plan\.services\.storage_gb", text)
    boots_usd = 90 / 3600 * (3 * 2 * 0.1 + 0.4)
    assert costs[-1].usd == pytest.approx(boots_usd), "each worker boots once, and those on spot once more per cycle"
    assert sum_of(costs) == pytest.approx(0.90 + 0.36 + boots_usd)
    assert lines[-1].endswith("11.29 USD, without storage")


def test_what_runs_anyway_is_not_counted_and_stated_prices_count_more() -> None:
    services = ServicesConfig(run_anyway=["kafka", "egress"], cache_usd_per_h=0.25, storage_gb=730.0)
    costs = {line.key: line for line in service_costs("msk", services, 3600.0)}
    assert costs["kafka"][2:] == (None, "not counted: runs anyway (plan.services.run_anyway)")
    assert costs["egress"].source.startswith("not counted")
    assert costs["cache"][1:] == ("cache", 0.25, "0.25 USD/h, plan.services.cache_usd_per_h")
    assert costs["storage"].usd == pytest.approx(0.08)
    assert service_costs("msk", ServicesConfig(cache_usd_per_h=0.0), 0.0)[1].usd == 0.0
