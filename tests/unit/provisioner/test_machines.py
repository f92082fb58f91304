"""The fleet that a job file names: the right adapter with the right prices and the right bills, and its end."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from doll.config import JobConfig, parse
from doll.errors import ConfigError
from doll.provisioner.billing import EC2_LINUX, LOCAL
from doll.provisioner.fleets.compose import ComposeFleet
from doll.provisioner.fleets.ec2.fleet import Ec2Fleet
from doll.provisioner.fleets.port import Order
from doll.provisioner.machines import OPENERS, Machines, open_machines, stated_prices
from doll.provisioner.prices.port import StatedPrices
from doll.theory.cost import Prices
from fake_fleet import FakeFleet, VirtualClock
from fleet_rigs import ComposeRig, Ec2Rig
from moto_overlay import REGION

ORDER = Order(slot=0, incarnation=1, market="on_demand", attempt=0)
PRICES = "plan: {spot_usd_per_h: 0.1, on_demand_usd_per_h: 0.3}"


def job(fleet: str, plan: str = PRICES) -> JobConfig:
    return parse(f"job: digits\ntask: {{class: 'examples.digits.task:Digits'}}\n{plan}\nfleet: {fleet}\n")


def closed(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> list[Any]:
    """The fleets of this kind that are closed from now on."""
    fleets: list[Any] = []
    close = kind.close

    def noted(self: Any) -> None:
        fleets.append(self)
        close(self)

    monkeypatch.setattr(kind, "close", noted)
    return fleets


@pytest.mark.slow
def test_ec2_is_bought_with_the_jobs_tags_at_its_own_prices_and_billed_as_it_bills(
    rig: Ec2Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.market.prices["c5.xlarge", REGION + "a"] = [(0.0, 0.07)]
    ends = closed(monkeypatch, Ec2Fleet)
    settings: dict[str, Any] = {
        "kind": "ec2", "region": REGION, "launch_template": rig.template, "launch_template_version": 1,
        "subnets": rig.subnets[:1], "instance_types": ["c5.xlarge"], "queue_url": rig.queue_url,
    }  # fmt: skip
    cached = {"c5.xlarge": {"usd_per_h": 0.17, "source": "test", "as_of": "2026-11-01"}}
    monkeypatch.setattr("doll.provisioner.prices.ec2.OnDemandPrices.lookup", _price_of(cached))
    with open_machines(job(json.dumps(settings)), tmp_path) as machines:
        assert isinstance(machines.fleet, Ec2Fleet)
        assert (machines.billing, machines.probe) == (EC2_LINUX, None)
        made = machines.fleet.launch(ORDER)
        rig.advance(60.0)  # until it is listed
        (group,) = rig.ec2.describe_instances(InstanceIds=[made.id])["Reservations"]
        tags = {tag["Key"]: tag["Value"] for tag in group["Instances"][0]["Tags"]}
        assert tags["doll:cluster"] == "digits"
        assert machines.prices.current(rig.clock()) == Prices(0.07, 0.17)
        assert ends == []
    assert ends == [machines.fleet]


def _price_of(known: dict[str, dict[str, Any]]) -> Any:
    """moto has no price list."""
    from doll.provisioner.prices.shipped import OnDemandPrice

    return lambda self, instance_type: OnDemandPrice(**known[instance_type])


def test_compose_is_billed_at_the_prices_that_the_job_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = ComposeRig(tmp_path)
    ends = closed(monkeypatch, ComposeFleet)
    monkeypatch.setenv("FAKE_DOCKER", str(tmp_path))
    fleet = {
        "kind": "compose", "docker": str(tmp_path / "docker"), "file": str(tmp_path / "docker-compose.yml"),
        "project": "doll", "timeout_s": 120,
    }  # fmt: skip
    with open_machines(job(json.dumps(fleet)), tmp_path) as machines:
        assert isinstance(machines.fleet, ComposeFleet)
        assert (machines.billing, machines.probe) == (LOCAL, None)
        assert machines.prices.current(0.0) == Prices(0.1, 0.3)
        made = machines.fleet.launch(ORDER)
        assert made.id in rig.state()["containers"]
    assert ends == [machines.fleet]
    with (
        pytest.raises(ConfigError, match=r"expected plan\.spot_usd_per_h"),
        open_machines(job(json.dumps(fleet), plan=""), tmp_path),
    ):
        pytest.fail("there are no prices")
    assert len(ends) == 2, "what was opened is closed"


@pytest.mark.parametrize("plan", ["", "plan: {spot_usd_per_h: 0.1}", "plan: {on_demand_usd_per_h: 0.1}"])
def test_both_prices_must_be_stated(plan: str) -> None:
    with pytest.raises(ConfigError, match="this fleet has no price list"):
        stated_prices(job("{kind: compose}", plan))


def test_an_error_of_whoever_uses_it_comes_through_and_ends_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = closed(monkeypatch, ComposeFleet)
    with pytest.raises(ZeroDivisionError), open_machines(job("{kind: compose}"), tmp_path):
        raise ZeroDivisionError
    assert len(ends) == 1


def test_a_new_fleet_is_one_opener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`OPENERS` is the one place that a fleet is registered in, beside its section of the job file."""
    machines = Machines(FakeFleet(VirtualClock()), StatedPrices(0.1, 0.2), LOCAL)
    monkeypatch.setitem(OPENERS, "compose", lambda config, run_folder: nullcontext(machines))
    with open_machines(job("{kind: compose}"), tmp_path) as opened:
        assert opened is machines
    monkeypatch.delitem(OPENERS, "compose")
    with pytest.raises(ConfigError, match=r"fleet\.kind: expected ec2 or kubernetes or ray or lambda, got compose"):
        open_machines(job("{kind: compose}"), tmp_path)
