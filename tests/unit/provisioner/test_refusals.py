"""Refusals that are not for lack of capacity: a controller on moto's EC2, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from doll.provisioner.billing import LOCAL
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from fleet_rigs import Ec2Rig, ec2
from job_world import FlatPrices, settings
from memory_state_store import MemoryStateStore
from moto_overlay import REGION
from statuses import server_status

SERVICE_LINKED_ROLE = "AuthFailure.ServiceLinkedRoleCreationNotPermitted"
BLOCK_DEVICES = "InvalidBlockDeviceMapping"
STEP_S = 10.0


class Stack:
    """A controller that buys on EC2."""

    def __init__(self, rig: Ec2Rig) -> None:
        self.rig = rig
        job = settings(3, deadline_s=4000.0)
        self.state_store = MemoryStateStore()
        self.controller = Controller(job, rig.fleet, FlatPrices(), LOCAL, self.state_store, job="digits")
        self.decisions: list[Decision] = []

    def refuse(self, kind: str, code: str) -> None:
        for type_ in self.rig.types:
            for zone in "ab":
                self.rig.market.error_codes[(type_, REGION + zone), kind] = code

    def turn(self) -> Decision:
        self.controller.observed.feed(server_status(), self.rig.clock())
        self.decisions.append(self.controller.turn(self.rig.clock()))
        self.rig.advance(STEP_S)
        return self.decisions[-1]

    def alive(self, market: str) -> int:
        return sum(instance.is_alive and instance.market == market for instance in self.rig.fleet.instances())


@pytest.fixture
def stack() -> Iterator[Stack]:
    with ec2() as rig:
        assert isinstance(rig, Ec2Rig)
        yield Stack(rig)


def test_one_code_of_all_pools_of_both_markets_stops_and_says_what_to_do(stack: Stack) -> None:
    for kind in ("spot", "on-demand"):
        stack.refuse(kind, BLOCK_DEVICES)
    first = stack.turn()
    assert first.phase == "run", "one turn says little: what was made a moment ago may not be known everywhere yet"
    assert any(BLOCK_DEVICES in alarm and "launch template" in alarm for alarm in first.alarms), first.alarms
    (code,) = {
        entry["code"]
        for entry in stack.state_store.journal
        if entry["kind"] == "launch_failed" and entry["code"] != "KnownDry"
    }
    assert code == BLOCK_DEVICES
    while stack.turn().phase == "run":
        assert len(stack.decisions) < 60, "after a bounded number of turns"
    last = stack.decisions[-1]
    assert last.phase == "stopped"
    (said,) = [alarm for alarm in last.alarms if "no machine is launched any more" in alarm]
    assert BLOCK_DEVICES in said
    assert "doll provision run" in said
    requests = len(stack.rig.market.requests)
    stack.turn()
    assert len(stack.rig.market.requests) == requests <= 40


@pytest.mark.slow
def test_a_refusal_of_one_market_is_an_alarm_and_the_other_is_used(stack: Stack) -> None:
    stack.refuse("spot", SERVICE_LINKED_ROLE)
    for _ in range(40):
        decision = stack.turn()
    assert decision.phase == "run"
    (said,) = [alarm for alarm in decision.alarms if SERVICE_LINKED_ROLE in alarm]
    assert "create-service-linked-role --aws-service-name spot.amazonaws.com" in said
    assert stack.alive("on_demand") >= 1, "on-demand machines are available"
    stack.rig.market.error_codes.clear()
    for _ in range(40):
        decision = stack.turn()
    assert not any(SERVICE_LINKED_ROLE in alarm for alarm in decision.alarms), "a machine was bought: it is over"
    assert stack.alive("spot") >= 2


@pytest.mark.slow
def test_dry_pools_never_stop_it_and_are_asked_again(stack: Stack) -> None:
    for kind in ("spot", "on_demand"):
        stack.rig.run_dry(kind)
    for _ in range(60):
        assert stack.turn().phase == "run"
    assert not any("capacity" in alarm for alarm in stack.decisions[-1].alarms)
    stack.rig.market.capacity.clear()
    for _ in range(30):
        stack.turn()
    assert stack.alive("spot") == 3, "also pools that each slot in turn has found to be dry"


def test_a_dry_pool_among_those_that_refuse_is_no_reason_to_stop(stack: Stack) -> None:
    for kind in ("spot", "on-demand"):
        stack.refuse(kind, BLOCK_DEVICES)
        del stack.rig.market.error_codes[(stack.rig.types[0], REGION + "a"), kind]
        stack.rig.market.capacity[(stack.rig.types[0], REGION + "a"), kind] = 0
    for _ in range(60):
        assert stack.turn().phase == "run"
