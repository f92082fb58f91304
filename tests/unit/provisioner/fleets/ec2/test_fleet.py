"""What only the EC2 fleet does: tokens, zones, errors, what it never touches. On moto with a market (tests/support)."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import boto3
import pytest
from doll.config import parse
from doll.errors import ConfigError
from doll.provisioner.fleets.ec2 import fleet as ec2_fleet
from doll.provisioner.fleets.ec2.client import CallPacer, aws_client
from doll.provisioner.fleets.ec2.fleet import Ec2Fleet
from doll.provisioner.fleets.ec2.tags import client_token
from doll.provisioner.fleets.port import EndReason, InstanceState, LaunchError, LaunchFailure, Order
from fleet_rigs import Ec2Rig, refused
from hypothesis import given
from hypothesis import strategies as st
from moto_overlay import REGION

ZONE_A, ZONE_B = f"{REGION}a", f"{REGION}b"
# docs/aws.md promises that these are enough.
ALLOWED = {
    "DescribeInstances",
    "DescribeInstanceTypeOfferings",
    "DescribeSubnets",
    "CreateFleet",
    "TerminateInstances",
}


def dry(rig: Ec2Rig, zone: str, kind: str = "spot") -> None:
    for type_ in rig.types:
        rig.market.capacity[(type_, zone), kind] = 0


def overrides(request: dict[str, Any]) -> list[tuple[str, str]]:
    (config,) = request["LaunchTemplateConfigs"]
    return [(override["InstanceType"], override["SubnetId"]) for override in config["Overrides"]]


# --- the request ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_launch_asks_for_one_instance_of_one_market_that_carries_its_identity_everywhere(rig: Ec2Rig) -> None:
    rig.fleet.launch(Order(3, 2, "spot", attempt=1))
    (request,) = rig.market.requests
    assert request["Type"] == "instant"
    assert request["ClientToken"] == "digits-w3-i2-spot-a1"
    assert request["TargetCapacitySpecification"] == {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"}
    assert request["SpotOptions"] == {"AllocationStrategy": "price-capacity-optimized"}, "and no maximum price"
    (config,) = request["LaunchTemplateConfigs"]
    assert config["LaunchTemplateSpecification"] == {"LaunchTemplateId": rig.template, "Version": "1"}
    tags = {
        "doll:cluster": "digits", "doll:worker": "3", "doll:incarnation": "2", "doll:market": "spot",
        "doll:job": "digits",
    }  # fmt: skip
    assert {specification["ResourceType"] for specification in request["TagSpecifications"]} == {
        "instance",
        "volume",
        "network-interface",
        "fleet",
    }
    for specification in request["TagSpecifications"]:
        assert {tag["Key"]: tag["Value"] for tag in specification["Tags"]} == tags


def test_on_demand_is_asked_for_as_such(rig: Ec2Rig) -> None:
    made = rig.fleet.launch(Order(0, 1, "on_demand"))
    (request,) = rig.market.requests
    assert request["TargetCapacitySpecification"]["DefaultTargetCapacityType"] == "on-demand"
    assert request["OnDemandOptions"] == {"AllocationStrategy": "lowest-price"}
    assert made.market == "on_demand"


def test_a_template_may_be_given_by_name(rig: Ec2Rig) -> None:
    rig.make(launch_template="doll-workers").launch(Order(0, 1, "spot"))
    (config,) = rig.market.requests[0]["LaunchTemplateConfigs"]
    assert config["LaunchTemplateSpecification"] == {"LaunchTemplateName": "doll-workers", "Version": "1"}


ORDERS = st.builds(
    Order,
    slot=st.integers(0, 9999),
    incarnation=st.integers(1, 10**6),
    market=st.sampled_from(["spot", "on_demand"]),
    attempt=st.integers(0, 999),
)
CLUSTERS = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,62}", fullmatch=True)


@pytest.mark.slow
@given(CLUSTERS, CLUSTERS, ORDERS, ORDERS, st.integers(0, 5), st.integers(0, 5))
def test_tokens_fit_and_differ_as_orders_do(a: str, b: str, one: Order, two: Order, m: int, n: int) -> None:
    first, second = client_token(a, one, m), client_token(b, two, n)
    assert len(first) <= 64
    assert first.isascii()
    assert (first == second) == ((a, one, m) == (b, two, n))


# --- zones and dry pools ----------------------------------------------------------------------------------------------


def test_the_first_subnets_zone_is_asked_first_and_the_next_when_it_is_dry(rig: Ec2Rig) -> None:
    assert rig.fleet.launch(Order(0, 1, "spot")).pool.endswith(ZONE_A)
    assert overrides(rig.market.requests[0]) == [(type_, rig.subnets[0]) for type_ in rig.types]
    dry(rig, ZONE_A)
    assert rig.fleet.launch(Order(1, 1, "spot")).pool.endswith(ZONE_B)
    assert [request["ClientToken"] for request in rig.market.requests[1:]] == [
        "digits-w1-i1-spot-a0",
        "digits-w1-i1-spot-a0z1",
    ]


def test_the_cheapest_pool_that_has_room_is_taken(rig: Ec2Rig) -> None:
    for type_, usd in zip(rig.types, (0.09, 0.05, 0.07), strict=True):
        rig.market.prices[type_, ZONE_A] = [(rig.clock() - 60, usd)]
    assert rig.fleet.launch(Order(0, 1, "spot")).pool == f"{rig.types[1]}/{ZONE_A}"
    rig.market.capacity[(rig.types[1], ZONE_A), "spot"] = 0
    assert rig.fleet.launch(Order(1, 1, "spot")).pool == f"{rig.types[2]}/{ZONE_A}"


def test_what_is_known_to_be_dry_is_not_asked_for_three_minutes(rig: Ec2Rig) -> None:
    rig.run_dry("spot")
    first = refused(rig.fleet, Order(0, 1, "spot"))
    assert first.code == "InsufficientInstanceCapacity"
    assert len(rig.market.requests) == 2, "once in each zone"
    for attempt in range(1, 5):
        error = refused(rig.fleet, Order(0, 1, "spot", attempt=attempt))
        assert (error.failure, error.code) == (LaunchFailure.CAPACITY, "KnownDry")
        rig.advance(40)
    assert len(rig.market.requests) == 2
    rig.fleet.launch(Order(0, 1, "on_demand"))
    rig.advance(30)
    assert refused(rig.fleet, Order(0, 1, "spot", attempt=9)).code == "InsufficientInstanceCapacity"
    rig.market.capacity.clear()
    rig.advance(181)
    rig.fleet.launch(Order(0, 1, "spot", attempt=10))


def test_an_interruption_makes_its_pool_one_to_leave_alone(rig: Ec2Rig) -> None:
    taken = rig.fleet.launch(Order(0, 1, "spot"))
    rig.advance(3000)
    rig.fleet.instances()
    rig.interrupt(taken.id)
    rig.fleet.instances()
    assert rig.fleet.launch(Order(0, 2, "spot")).pool != taken.pool


def test_a_type_that_a_zone_does_not_offer_is_never_asked_for(rig: Ec2Rig) -> None:
    fleet = rig.make(instance_types=("c5.xlarge", "c99.mega"))
    fleet.launch(Order(0, 1, "spot"))
    assert overrides(rig.market.requests[0]) == [("c5.xlarge", rig.subnets[0])]
    assert fleet.offers.zones() == [ZONE_A, ZONE_B]
    error = refused(rig.make(instance_types=("c99.mega",)), Order(0, 1, "spot"))
    assert error.failure is LaunchFailure.CONFIG
    assert "correct fleet.instance_types" in str(error)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "market", "failure", "calls_later"),
    [
        ("InsufficientInstanceCapacity", "spot", LaunchFailure.CAPACITY, 0),
        ("UnfulfillableCapacity", "on_demand", LaunchFailure.CAPACITY, 0),
        ("MaxSpotInstanceCountExceeded", "spot", LaunchFailure.SPOT_QUOTA, 0),
        ("VcpuLimitExceeded", "on_demand", LaunchFailure.ON_DEMAND_QUOTA, 0),
        ("VcpuLimitExceeded", "spot", LaunchFailure.SPOT_QUOTA, 0),
        ("Unsupported", "spot", LaunchFailure.CAPACITY, 0),
        ("InsufficientFreeAddressesInSubnet", "spot", LaunchFailure.CAPACITY, 0),
        ("SomethingNew", "spot", LaunchFailure.REFUSED, 0),
        ("InvalidBlockDeviceMapping", "on_demand", LaunchFailure.REFUSED, 0),
        ("UnauthorizedOperation", "spot", LaunchFailure.CONFIG, 1),
    ],
)
def test_what_pools_say_decides_what_the_launch_says(
    rig: Ec2Rig, code: str, market: Any, failure: LaunchFailure, calls_later: int
) -> None:
    kind = market.replace("_", "-")
    for type_ in rig.types:
        for zone in (ZONE_A, ZONE_B):
            rig.market.error_codes[(type_, zone), kind] = code
    error = refused(rig.fleet, Order(0, 1, market))
    assert (error.failure, error.code) == (failure, code)
    before = len(rig.market.requests)
    refused(rig.fleet, Order(0, 1, market, attempt=1))
    assert len(rig.market.requests) - before == calls_later


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("RequestLimitExceeded", LaunchFailure.THROTTLED),
        ("InternalError", LaunchFailure.THROTTLED),
        ("Unavailable", LaunchFailure.THROTTLED),
        ("UnauthorizedOperation", LaunchFailure.CONFIG),
        ("InvalidLaunchTemplateId.NotFound", LaunchFailure.CONFIG),
        ("InvalidAMIID.NotFound", LaunchFailure.CONFIG),
        ("NobodyKnows", LaunchFailure.CONFIG),
        ("MaxSpotInstanceCountExceeded", LaunchFailure.SPOT_QUOTA),
    ],
)
def test_a_call_that_fails_as_a_whole(rig: Ec2Rig, code: str, failure: LaunchFailure) -> None:
    rig.market.api_errors.append(code)
    error = refused(rig.fleet, Order(0, 1, "spot"))
    assert (error.failure, error.code) == (failure, code)


def test_a_quota_is_asked_again_after_a_quarter_of_an_hour(rig: Ec2Rig) -> None:
    rig.market.api_errors.append("MaxSpotInstanceCountExceeded")
    refused(rig.fleet, Order(0, 1, "spot"))
    rig.advance(890)
    assert "asked again in 10 s" in str(refused(rig.fleet, Order(0, 1, "spot", attempt=1)))
    rig.advance(11)
    rig.fleet.launch(Order(0, 1, "spot", attempt=2))


def test_subnets_that_are_not_there_are_a_mistake(rig: Ec2Rig) -> None:
    error = refused(rig.make(subnets=["subnet-0123456789abcdef0"]), Order(0, 1, "spot"))
    assert (error.failure, error.code) == (LaunchFailure.CONFIG, "InvalidSubnetID.NotFound")


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_a_repeated_order_sends_the_same_request_though_pools_have_run_dry_since(rig: Ec2Rig) -> None:
    order = Order(0, 1, "spot")
    rig.market.api_errors.append("RequestLimitExceeded")
    refused(rig.fleet, order)
    rig.market.capacity[(rig.types[0], ZONE_A), "spot"] = 0
    rig.fleet.launch(Order(1, 1, "spot"))  # learns that this pool is dry
    rig.market.capacity.clear()
    rig.fleet.launch(order)
    same = [request for request in rig.market.requests if request["ClientToken"] == "digits-w0-i1-spot-a0"]
    assert len(same) == 2
    assert same[0] == same[1]
    assert len(overrides(same[1])) == 3


def test_a_token_that_was_used_for_another_request_leads_to_what_is_there(rig: Ec2Rig) -> None:
    """The answer was lost, the provisioner died, and its successor knows other pools to be dry."""
    order = Order(0, 1, "spot")
    rig.lose_answer()
    refused(rig.fleet, order)
    rig.crash()
    other = Order(0, 1, "spot", avoid=frozenset({f"{rig.types[0]}/{ZONE_A}"}))
    error = refused(rig.fleet, other)
    assert error.failure is LaunchFailure.TAKEN, "EC2's listing does not show it yet"
    rig.advance(15)
    made = rig.fleet.launch(other)
    rig.advance(90)
    assert [instance.id for instance in rig.fleet.instances()] == [made.id]


@pytest.mark.slow
def test_no_crash_and_no_lost_answer_makes_two_machines_of_one_incarnation(rig: Ec2Rig) -> None:
    rng = random.Random(7)
    for slot in range(20):
        order = Order(slot, 1, rng.choice(["spot", "on_demand"]))
        for _ in range(30):
            match rng.randrange(5):
                case 0:
                    rig.lose_answer()
                case 1:
                    rig.crash()
                case 2:
                    rig.advance(rng.choice([1, 5, 20]))
                case 3:
                    rig.throttle()
            with contextlib.suppress(LaunchError):
                rig.fleet.launch(order)
                if rng.randrange(3) == 0:
                    break
        rig.market.api_errors.clear()
        rig.market.lost_answers = 0
        rig.advance(20)
        rig.fleet.launch(order)
    rig.advance(90)
    assert Counter(instance.slot for instance in rig.fleet.instances()) == dict.fromkeys(range(20), 1)


# --- listing ----------------------------------------------------------------------------------------------------------


def test_a_listing_of_several_pages_is_whole(rig: Ec2Rig) -> None:
    made = {rig.fleet.launch(Order(slot, 1, "spot")).id for slot in range(13)}
    rig.advance(90)
    rig.crash()
    assert {instance.id for instance in rig.fleet.instances()} == made


@pytest.mark.slow
def test_the_state_of_the_machine_says_who_ended_it_and_when(rig: Ec2Rig) -> None:
    ended = {}
    for slot, how in enumerate(("terminate", "interrupt", "fail")):
        ended[how] = rig.fleet.launch(Order(slot, 1, "spot")).id
    rig.advance(100)
    rig.fleet.terminate([ended["terminate"]])
    rig.market.shut_down_from_inside(ended["fail"])
    rig.market.interrupt(ended["interrupt"], 0.0, announced=False)
    at_s = rig.clock()
    rig.advance(10)
    rig.fleet.instances()
    rig.crash()  # what was seen before does not matter
    rig.advance(300)
    instances = {instance.id: instance for instance in rig.fleet.instances()}
    assert [instances[ended[how]].end_reason for how in ("terminate", "interrupt", "fail")] == [
        EndReason.TERMINATED,
        EndReason.INTERRUPTED,
        EndReason.FAILED,
    ]
    assert instances[ended["terminate"]].ended_s == instances[ended["fail"]].ended_s == at_s


def test_one_that_nobody_tells_of_any_more_has_ended(rig: Ec2Rig) -> None:
    made = rig.fleet.launch(Order(0, 1, "spot"))
    rig.market.lag_s = 1e9
    rig.advance(50)
    assert [instance.is_alive for instance in rig.fleet.instances()] == [True], "listings lag"
    rig.advance(20)
    (gone,) = rig.fleet.instances()
    assert (gone.id, gone.state, gone.end_reason) == (made.id, InstanceState.ENDED, EndReason.FAILED)
    rig.advance(4000)
    assert list(rig.fleet.instances()) == []


def test_machines_of_the_cluster_that_are_no_workers_are_let_alone(rig: Ec2Rig) -> None:
    """The host of the parameter server may carry the cluster's tag."""
    made = rig.ec2.run_instances(
        ImageId="ami-03cf127a", MinCount=2, MaxCount=2, SubnetId=rig.subnets[0], InstanceType="m5.large",
        TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": "doll:cluster", "Value": "digits"}]}],
    )["Instances"]  # fmt: skip
    hosts = [instance["InstanceId"] for instance in made]
    rig.ec2.create_tags(Resources=[hosts[1]], Tags=[{"Key": "doll:worker", "Value": "first"}])
    assert list(rig.fleet.instances()) == []
    rig.fleet.terminate(hosts)
    assert rig.market.terminated == []


def test_only_our_own_living_ones_are_terminated_and_each_once(rig: Ec2Rig) -> None:
    theirs = rig.strangers().launch(Order(0, 1, "spot"))
    ours = [rig.fleet.launch(Order(slot, 1, "spot")).id for slot in range(3)]
    rig.advance(90)
    rig.crash()
    rig.fleet.terminate([*ours, theirs.id, "i-0123456789abcdef0"])
    rig.fleet.terminate(ours)
    rig.advance(90)
    rig.fleet.instances()
    rig.fleet.terminate(ours)
    assert sorted(rig.market.terminated) == sorted(ours)


def test_nothing_is_called_that_the_role_does_not_allow(rig: Ec2Rig) -> None:
    called: set[str] = set()

    def note(model: Any, **_: Any) -> None:
        called.add(model.name)

    rig.ec2.meta.events.register("before-call.ec2.*", note)
    made = rig.fleet.launch(Order(0, 1, "spot"))
    rig.run_dry("spot")
    refused(rig.fleet, Order(1, 1, "spot"))
    rig.fleet.launch(Order(1, 1, "on_demand"))
    rig.advance(90)
    rig.fleet.instances()
    rig.fleet.terminate([made.id])
    rig.ec2.meta.events.unregister("before-call.ec2.*", note)
    assert called == ALLOWED


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_calls_are_kept_apart() -> None:
    now = [100.0]
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pacer = CallPacer(2.0, clock=lambda: now[0], sleep=sleep)
    for _ in range(3):
        pacer.wait()
    assert slept == [0.5, 0.5]
    now[0] += 10
    pacer.wait()
    assert slept == [0.5, 0.5]


def test_a_fleet_is_made_from_the_job_file(rig: Ec2Rig) -> None:
    config = parse(
        f"""
job: digits
task: {{class: 'examples.digits.task:Digits'}}
fleet:
  kind: ec2
  region: {REGION}
  launch_template: {rig.template}
  launch_template_version: 1
  subnets: [{", ".join(rig.subnets)}]
  instance_types: [c5.xlarge]
  queue_url: {rig.queue_url}
  api_calls_per_s: 20
"""
    )
    fleet = ec2_fleet.connect(config)
    made = fleet.launch(Order(2, 5, "spot"))
    assert made.pool == f"c5.xlarge/{ZONE_A}"
    assert [instance.id for instance in fleet.instances()] == [made.id]
    fleet.close()


def test_a_job_on_another_fleet_has_none_on_ec2() -> None:
    config = parse("job: digits\ntask: {class: 'examples.digits.task:Digits'}\n")
    with pytest.raises(ConfigError, match=r"fleet\.kind: expected ec2, got processes"):
        ec2_fleet.connect(config)


def test_without_credentials_nothing_loops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # another test's has credentials
    fleet = Ec2Fleet(
        aws_client("ec2", REGION), cluster="c", launch_template="lt-1", version=1,
        subnets=["subnet-1"], instance_types=["c5.xlarge"],
    )  # fmt: skip
    with pytest.raises(ConfigError, match="listing instances: Unable to locate credentials"):
        fleet.instances()
