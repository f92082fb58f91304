"""Which pools are left alone, for how long; and that the table of error codes says what the documentation says."""

from __future__ import annotations

import re

import pytest
from doll.provisioner.fleets.ec2.capacity import CapacityCache, Ec2Pool
from doll.provisioner.fleets.ec2.errors import RULES, Scope, rule_of_call, rule_of_pool, worst
from doll.provisioner.fleets.port import LaunchFailure
from paths import DOCS

A, B, C, D = (Ec2Pool(type_, "us-east-1a") for type_ in ("c5.xlarge", "c6i.xlarge", "m5.xlarge", "m6i.xlarge"))
FAR = Ec2Pool("c5.xlarge", "us-east-1b")


def test_a_pool_is_named_by_type_and_zone() -> None:
    assert A.name == "c5.xlarge/us-east-1a"
    assert Ec2Pool.parse(A.name) == A
    for wrong in ("", "c5.xlarge", "/us-east-1a", "c5.xlarge/"):
        with pytest.raises(ValueError, match="expected type/zone"):
            Ec2Pool.parse(wrong)


def test_a_dry_pool_is_left_alone_in_its_market_for_three_minutes() -> None:
    cache = CapacityCache()
    cache.mark_unavailable(A, "spot", 1000.0)
    assert cache.lacks_capacity(A, "spot", 1179.9)
    assert not cache.lacks_capacity(A, "spot", 1180.0)
    assert not cache.lacks_capacity(A, "on_demand", 1000.0)
    assert not cache.lacks_capacity(B, "spot", 1000.0)
    assert not cache.lacks_capacity(FAR, "spot", 1000.0)


def test_three_pools_within_a_minute_are_the_zone() -> None:
    cache = CapacityCache()
    cache.mark_unavailable(A, "spot", 1000.0)
    cache.mark_unavailable(B, "spot", 1030.0)
    cache.mark_unavailable(B, "spot", 1040.0)
    assert not cache.lacks_capacity(D, "spot", 1040.0), "the same pool twice is one pool"
    cache.mark_unavailable(C, "spot", 1059.0)
    assert cache.lacks_capacity(D, "spot", 1059.0)
    assert cache.lacks_capacity(D, "spot", 1238.9)
    assert not cache.lacks_capacity(D, "spot", 1239.0)
    assert not cache.lacks_capacity(D, "on_demand", 1059.0)
    assert not cache.lacks_capacity(FAR, "spot", 1059.0)


def test_three_pools_in_more_than_a_minute_are_not() -> None:
    cache = CapacityCache()
    for at_s, pool in ((1000.0, A), (1040.0, B), (1061.0, C)):
        cache.mark_unavailable(pool, "spot", at_s)
    assert not cache.lacks_capacity(D, "spot", 1061.0)


def test_a_pool_that_gives_a_machine_is_forgiven_with_its_zone() -> None:
    cache = CapacityCache()
    for pool in (A, B, C):
        cache.mark_unavailable(pool, "spot", 1000.0)
    cache.clear(A, "spot")
    assert not cache.lacks_capacity(A, "spot", 1001.0)
    assert not cache.lacks_capacity(D, "spot", 1001.0)
    assert cache.lacks_capacity(B, "spot", 1001.0)


def test_what_is_ruled_out_says_nothing_of_its_zone() -> None:
    cache = CapacityCache()
    for pool in (A, B, C):
        cache.exclude(pool, "spot", float("inf"))
    assert cache.lacks_capacity(A, "spot", 1e12)
    assert not cache.lacks_capacity(D, "spot", 1000.0)
    cache.mark_unavailable(A, "spot", 1000.0)
    assert cache.lacks_capacity(A, "spot", 1e12), "a shorter hold does not end a longer one"


def test_a_market_without_quota_is_left_alone_as_a_whole() -> None:
    cache = CapacityCache()
    cache.mark_market("spot", 1000.0, 900.0)
    assert cache.lacks_capacity(A, "spot", 1899.0)
    assert cache.market_until_s("spot", 1899.0) == 1900.0
    assert cache.market_until_s("spot", 1900.0) is None
    assert cache.market_until_s("on_demand", 1000.0) is None
    assert not cache.lacks_capacity(A, "on_demand", 1000.0)


def test_unknown_codes_are_never_looped_on() -> None:
    assert rule_of_pool("SomethingNew").scope is Scope.POOL
    assert rule_of_call("SomethingNew").failure is LaunchFailure.CONFIG
    assert rule_of_call("SomethingNew", 503).failure is LaunchFailure.THROTTLED
    assert rule_of_call("InvalidAMIID.Malformed").failure is LaunchFailure.CONFIG


def test_the_worst_of_several_names_the_failure() -> None:
    codes = ["Unsupported", "UnauthorizedOperation", "MaxSpotInstanceCountExceeded", "InsufficientInstanceCapacity"]
    assert worst(map(rule_of_pool, codes)).failure is LaunchFailure.SPOT_QUOTA
    assert worst(map(rule_of_pool, codes[:2])).failure is LaunchFailure.CAPACITY
    assert worst(map(rule_of_pool, codes[1:2])).failure is LaunchFailure.CONFIG


def test_whatever_a_rule_holds_back_it_holds_back_for_a_while() -> None:
    for code, rule in RULES.items():
        assert (rule.scope is Scope.NONE) == (rule.backoff_s == 0), code


def test_the_documentation_has_every_code() -> None:
    page = (DOCS / "aws.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([A-Za-z]+(?:\.\*)?)`", page))
    missing = {code.replace(".", ".*") if code.endswith(".") else code for code in RULES} - documented
    assert not missing, f"docs/aws.md lacks {sorted(missing)}"
