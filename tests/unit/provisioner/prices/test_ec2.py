"""EC2's prices: spot from moto's market, on-demand through botocore's own check of requests and answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from botocore.exceptions import EndpointConnectionError
from botocore.stub import Stubber
from doll.config import parse
from doll.errors import ServiceUnavailableError
from doll.provisioner.fleets.ec2 import fleet as ec2_fleet
from doll.provisioner.prices import ec2 as ec2_prices
from doll.provisioner.prices.ec2 import Ec2Prices, OnDemandPrices
from doll.provisioner.prices.shipped import shipped_prices
from fleet_rigs import Ec2Rig
from moto_overlay import REGION, client

C5, C6I = "c5.xlarge", "c6i.xlarge"
ZONES = [f"{REGION}a", f"{REGION}b"]
TODAY = date(2026, 11, 22)


@pytest.fixture
def rig(rig: Ec2Rig) -> Ec2Rig:
    """The same, with a history of prices."""
    start_s = rig.clock()
    rig.market.prices = {
        (C5, ZONES[0]): [(start_s - 9000, 0.07), (start_s - 3000, 0.08), (start_s - 600, 0.06)],
        (C6I, ZONES[0]): [(start_s - 9000, 0.05)],
        (C5, ZONES[1]): [(start_s - 9000, 0.09), (start_s - 10, 0.04)],
    }
    return rig


def made_of(rig: Ec2Rig, **changes: Any) -> Ec2Prices:
    settings: dict[str, Any] = {
        "instance_types": [C5, C6I], "zones": ZONES, "clock": rig.clock, "page_size": 1,
    }  # fmt: skip
    return Ec2Prices(rig.ec2, OnDemandPrices(None, REGION), **{**settings, **changes})


def counted(rig: Ec2Rig) -> tuple[Counter[str], Callable[[], None]]:
    """Calls by name, and what ends the counting."""
    calls: Counter[str] = Counter()

    def note(model: Any, **_: Any) -> None:
        calls[model.name] += 1

    rig.ec2.meta.events.register("before-call.ec2.*", note)
    return calls, lambda: rig.ec2.meta.events.unregister("before-call.ec2.*", note)


def test_the_cheapest_pools_are_the_current_prices(rig: Ec2Rig) -> None:
    prices = made_of(rig).current(rig.clock())
    assert (prices.spot_usd_per_h, prices.on_demand_usd_per_h) == (0.04, 0.17)


@pytest.mark.slow
def test_a_dry_pool_has_no_price_unless_all_are_dry(rig: Ec2Rig) -> None:
    feed = made_of(rig, lacks_capacity=lambda pool, market, now_s: pool.zone == ZONES[1])
    assert feed.current(rig.clock()).spot_usd_per_h == 0.05
    feed = made_of(rig, lacks_capacity=lambda pool, market, now_s: True)
    assert feed.current(rig.clock()).spot_usd_per_h == 0.04


def test_prices_are_asked_again_after_five_minutes(rig: Ec2Rig) -> None:
    feed = made_of(rig, page_size=1000)
    calls, end = counted(rig)
    rig.market.prices[C5, ZONES[1]].append((rig.clock() + 100, 0.03))
    assert feed.current(rig.clock()).spot_usd_per_h == 0.04
    rig.advance(299)
    assert feed.current(rig.clock()).spot_usd_per_h == 0.04
    assert calls["DescribeSpotPriceHistory"] == 1
    rig.advance(2)
    assert feed.current(rig.clock()).spot_usd_per_h == 0.03
    assert calls["DescribeSpotPriceHistory"] == 2
    end()


def test_a_series_begins_with_the_last_change_before_it_and_has_every_page(rig: Ec2Rig) -> None:
    now_s = rig.clock()
    series = made_of(rig).series(f"{C5}/{ZONES[0]}", "spot", now_s - 4000, now_s)
    np.testing.assert_allclose(series.times_s - now_s, [-4000, -3000, -600, 0])
    np.testing.assert_allclose(series.values, [0.07, 0.08, 0.06, 0.06])
    expected = (1000 * 0.07 + 2400 * 0.08 + 600 * 0.06) / 4000
    assert series.mean(now_s - 4000, now_s) == pytest.approx(expected)


def test_pieces_that_are_asked_for_one_after_the_other_join(rig: Ec2Rig) -> None:
    feed, now_s, pool = made_of(rig), rig.clock(), f"{C5}/{ZONES[0]}"
    whole = made_of(rig).series(pool, "spot", now_s - 8000, now_s)
    feed.series(pool, "spot", now_s - 100, now_s)
    feed.series(pool, "spot", now_s - 3500, now_s)
    joined = feed.series(pool, "spot", now_s - 8000, now_s)
    np.testing.assert_allclose(joined.times_s, whole.times_s)
    np.testing.assert_allclose(joined.values, whole.values)
    calls, end = counted(rig)
    feed.series(pool, "spot", now_s - 5000, now_s)
    assert not calls
    end()


def test_the_last_price_holds_until_the_end(rig: Ec2Rig) -> None:
    now_s = rig.clock()
    series = made_of(rig).series(f"{C6I}/{ZONES[0]}", "spot", now_s - 10, now_s + 1000)
    np.testing.assert_allclose(series.values, 0.05)
    assert series.times_s[-1] == now_s + 1000


def test_a_pool_that_the_job_file_no_longer_names_has_a_price_too(rig: Ec2Rig) -> None:
    now_s = rig.clock()
    rig.market.prices["m5.xlarge", ZONES[0]] = [(now_s - 9000, 0.1)]
    assert made_of(rig).series(f"m5.xlarge/{ZONES[0]}", "spot", now_s - 10, now_s).values[0] == 0.1
    assert made_of(rig).series(f"m5.xlarge/{ZONES[0]}", "on_demand", now_s - 10, now_s).values[0] == 0.192


def test_while_ec2_is_away_old_prices_serve_and_new_ones_are_an_error(rig: Ec2Rig) -> None:
    feed = made_of(rig, page_size=1000)
    rig.become_unavailable()
    with pytest.raises(ServiceUnavailableError, match="asking for spot prices"):
        feed.current(rig.clock())
    assert feed.current(rig.clock()).spot_usd_per_h == 0.04
    rig.advance(400)
    rig.become_unavailable()
    assert feed.current(rig.clock()).spot_usd_per_h == 0.04
    calls, end = counted(rig)
    rig.advance(30)
    feed.current(rig.clock())
    assert not calls, "it is not asked at every turn"
    rig.advance(31)
    feed.current(rig.clock())
    assert calls["DescribeSpotPriceHistory"] == 1
    end()


def test_pools_without_any_price_are_an_error(rig: Ec2Rig) -> None:
    feed = made_of(rig, instance_types=["m5.xlarge"])
    with pytest.raises(ServiceUnavailableError, match=r"no spot price of m5\.xlarge in us-east-1a, us-east-1b"):
        feed.current(rig.clock())
    with pytest.raises(ServiceUnavailableError, match=r"no spot price of m5\.xlarge/us-east-1a"):
        feed.series(f"m5.xlarge/{ZONES[0]}", "spot", 0.0, rig.clock())


# --- on-demand --------------------------------------------------------------------------------------------------------


def product(*usd: str, unit: str = "Hrs") -> str:
    """As the price list writes it, cut to what matters."""
    dimensions = {str(n): {"unit": unit, "pricePerUnit": {"USD": price}} for n, price in enumerate(usd)}
    return json.dumps({"product": {}, "terms": {"OnDemand": {"a.b": {"priceDimensions": dimensions}}}})


@pytest.fixture
def pricing() -> Iterator[Stubber]:
    with Stubber(client("pricing")) as stubber:
        yield stubber


def filters(instance_type: str) -> dict[str, Any]:
    terms = {
        "instanceType": instance_type, "regionCode": REGION, "operatingSystem": "Linux", "tenancy": "Shared",
        "preInstalledSw": "NA", "capacitystatus": "Used",
    }  # fmt: skip
    return {
        "ServiceCode": "AmazonEC2",
        "Filters": [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in terms.items()],
    }


def on_demand(pricing: Stubber, cache: Path | None = None, today: date = TODAY) -> OnDemandPrices:
    return OnDemandPrices(pricing.client, REGION, cache=cache, today=lambda: today)


def test_the_price_list_is_asked_once_and_kept_in_a_file_for_a_week(pricing: Stubber, tmp_path: Path) -> None:
    cache = tmp_path / "run" / "prices.json"
    pricing.add_response("get_products", {"PriceList": [product("0.0000000000", "0.1750000000")]}, filters(C5))
    prices = on_demand(pricing, cache)
    for _ in range(2):
        price = prices.lookup(C5)
        assert price is not None
        assert (price.usd_per_h, price.source, price.as_of) == (0.175, "price list", "2026-11-22")
    kept = on_demand(pricing, cache, date(2026, 11, 28)).lookup(C5)
    assert kept is not None
    assert (kept.usd_per_h, kept.source) == (0.175, "price list, kept")
    pricing.add_response("get_products", {"PriceList": [product("0.18")]}, filters(C5))
    asked = on_demand(pricing, cache, date(2026, 11, 29)).lookup(C5)
    assert asked is not None
    assert asked.usd_per_h == 0.18
    pricing.assert_no_pending_responses()


def test_what_was_kept_serves_when_the_price_list_is_away(pricing: Stubber, tmp_path: Path) -> None:
    cache = tmp_path / "prices.json"
    cache.write_text(json.dumps({REGION: {C5: {"usd_per_h": 0.2, "as_of": "2026-01-01"}}}))
    pricing.add_client_error("get_products", "AccessDeniedException")
    price = on_demand(pricing, cache).lookup(C5)
    assert price is not None
    assert (price.usd_per_h, price.as_of) == (0.2, "2026-01-01")


@pytest.mark.parametrize(
    "answer",
    [[], ["not json"], ["{}"], [product("0.17", unit="Quantity")], [product("nan")], ['{"terms": {"OnDemand": []}}']],
)
def test_an_answer_of_no_use_leads_to_the_shipped_table_with_its_date(pricing: Stubber, answer: list[str]) -> None:
    pricing.add_response("get_products", {"PriceList": answer}, filters(C5))
    price = on_demand(pricing).lookup(C5)
    assert price is not None
    assert price.usd_per_h == 0.17
    assert price.as_of == "2026-01-19"
    assert price.source.startswith("shipped table: AWS price list")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"us-east-1": []}', '{"us-east-1": {"c5.xlarge": {"usd_per_h": -1}}}']
)
def test_a_file_that_is_damaged_is_written_anew(pricing: Stubber, tmp_path: Path, text: str) -> None:
    cache = tmp_path / "prices.json"
    cache.write_text(text)
    pricing.add_response("get_products", {"PriceList": [product("0.5")]}, filters(C5))
    price = on_demand(pricing, cache).lookup(C5)
    assert price is not None
    assert price.usd_per_h == 0.5
    assert json.loads(cache.read_text())[REGION][C5]["usd_per_h"] == 0.5


def test_a_price_that_nobody_knows_may_be_stated(rig: Ec2Rig) -> None:
    rig.market.prices["x9.mega", ZONES[0]] = [(rig.clock() - 100, 3.0)]
    feed = made_of(rig, instance_types=["x9.mega"], zones=ZONES[:1])
    with pytest.raises(ServiceUnavailableError, match=r"no on-demand price of x9\.mega is known: .*GetProducts"):
        feed.current(rig.clock())
    feed = made_of(rig, instance_types=["x9.mega"], zones=ZONES[:1], stated_usd_per_h=9.0)
    assert feed.current(rig.clock()).on_demand_usd_per_h == 9.0


def test_the_shipped_table_is_dated_and_sane() -> None:
    table = shipped_prices(REGION)
    assert len(table) > 100
    for name, price in table.items():
        assert 0.01 < price.usd_per_h < 10, name
        assert price.as_of == "early 2026" or date.fromisoformat(price.as_of) > date(2025, 1, 1)
    assert shipped_prices("eu-nowhere-1") == {}


@pytest.mark.slow
def test_prices_are_made_from_the_job_file(rig: Ec2Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(
        f"""
job: digits
task: {{class: 'examples.digits.task:Digits'}}
plan: {{on_demand_usd_per_h: 0.3}}
fleet:
  kind: ec2
  region: {REGION}
  launch_template: {rig.template}
  launch_template_version: 1
  subnets: [{", ".join(rig.subnets)}]
  instance_types: [{C5}]
"""
    )

    def away(self: Any, **_: Any) -> Any:
        raise EndpointConnectionError(endpoint_url="https://pricing")

    made = vars(ec2_prices)["aws_client"]

    def clients(service: str, region: str | None) -> Any:
        client = made(service, region)
        if service == "pricing":
            client.get_products = away.__get__(client)
        return client

    monkeypatch.setattr(ec2_prices, "aws_client", clients)
    feed = ec2_prices.connect(config, ec2_fleet.connect(config), run_folder=tmp_path)
    prices = feed.current(rig.clock())
    assert (prices.spot_usd_per_h, prices.on_demand_usd_per_h) == (0.04, 0.17)
