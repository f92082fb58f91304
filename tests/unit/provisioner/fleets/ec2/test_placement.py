"""Spot placement scores: one question, at the start and hourly; an answer for people, and never an obstacle."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structlog
from doll.config import JobConfig, parse
from doll.errors import ConfigError
from doll.provisioner.fleets.ec2 import account as ec2_account
from doll.provisioner.fleets.ec2.account import Ec2Placement
from fleet_rigs import Ec2Rig
from moto_overlay import REGION


def job(rig: Ec2Rig, **changes: Any) -> JobConfig:
    fleet = {
        "kind": "ec2", "region": REGION, "launch_template": rig.template, "launch_template_version": 1,
        "subnets": rig.subnets, "instance_types": list(rig.types), "placement_scores": True, **changes,
    }  # fmt: skip
    return parse(
        "job: digits\ntask: {class: 'examples.digits.task:Digits'}\ndata: {workers: 64}\n"
        f"fleet: {json.dumps(fleet)}\n"
    )


def made_of(rig: Ec2Rig) -> Ec2Placement:
    placement = ec2_account.connect(job(rig), rig.make())
    assert placement is not None
    return placement


def test_the_same_question_at_the_start_and_hourly(rig: Ec2Rig) -> None:
    placement = made_of(rig)
    ids = {subnet["AvailabilityZone"]: subnet["AvailabilityZoneId"] for subnet in rig.ec2.describe_subnets()["Subnets"]}
    rig.market.scores = {ids[REGION + "a"]: 2, "use1-az99": 5, ids[REGION + "b"]: 9}
    first = placement.poll_scores(0.0)
    assert first is not None
    assert list(first.items()) == [(REGION + "b", 9), ("use1-az99", 5), (REGION + "a", 2)], "best first"
    assert [placement.poll_scores(at_s) for at_s in (1.0, 3599.0)] == [None, None]
    rig.market.scores[ids[REGION + "a"]] = 10
    second = placement.poll_scores(3600.0)
    assert second is not None
    assert second[REGION + "a"] == 10
    one, other = rig.market.score_requests
    assert one == other
    assert one["InstanceTypes"] == list(rig.types)
    assert (int(one["TargetCapacity"]), one["RegionNames"]) == (64, [REGION])
    assert str(one["SingleAvailabilityZone"]).lower() == "true", "by zone, not by region"


def test_what_may_not_be_asked_is_logged_and_asked_an_hour_later(rig: Ec2Rig) -> None:
    placement = made_of(rig)
    rig.market.scores = None
    with structlog.testing.capture_logs() as logs:
        assert placement.poll_scores(0.0) is None
    assert [entry["event"] for entry in logs] == ["placement_scores_unavailable"]
    assert "UnauthorizedOperation" in logs[0]["reason"]
    assert placement.poll_scores(60.0) is None
    assert len(rig.market.score_requests) == 1
    rig.market.scores = {"use1-az99": 5}
    assert placement.poll_scores(3600.0) == {"use1-az99": 5}


def test_it_is_asked_for_only_where_the_job_wants_it_and_has_types_enough(rig: Ec2Rig) -> None:
    assert ec2_account.connect(job(rig, placement_scores=False), rig.make()) is None
    with pytest.raises(ConfigError, match="expected 3 or more instance_types"):
        job(rig, instance_types=["c5.xlarge", "c6i.xlarge"])
