"""Actors as machines: what Ray's table says of a worker's actor, and what it means."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, Order
from doll.provisioner.fleets.ray import actors
from doll.provisioner.fleets.ray.actors import Actor, Cause

LAUNCHED_S = 1_000.5
NOW_S = 1_100.0


def actor(state: str = "ALIVE", *, market: str = "spot", cause: Cause = "", end_s: float | None = None) -> Actor:
    order = Order(3, 2, "spot" if market == "spot" else "on_demand")
    return Actor(
        "doll-digits-3-2", actors.labels_of(order, "digits", "clicks", LAUNCHED_S), state, node="n1", started=True,
        cause=cause, end_s=end_s,
    )  # fmt: skip


def seen(
    each: Actor, known: Instance | None = None, draining: dict[str, float] | None = None, *, asked: bool = False
) -> Instance:
    instance = actors.instance_of(each, known, draining or {}, asked, NOW_S)
    assert instance is not None
    return instance


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("DEPENDENCIES_UNREADY", InstanceState.PENDING),
        ("PENDING_CREATION", InstanceState.PENDING),
        ("ALIVE", InstanceState.RUNNING),
    ],
)
def test_who_an_actor_is_stands_in_its_labels(state: str, expected: InstanceState) -> None:
    instance = seen(actor(state))
    assert (instance.slot, instance.incarnation, instance.market) == (3, 2, "spot")
    assert (instance.state, instance.launched_s) == (expected, LAUNCHED_S)
    assert (instance.notice_s, instance.ended_s, instance.end_reason) == (None, None, EndReason.NONE)


@pytest.mark.parametrize(
    ("market", "cause", "asked", "expected"),
    [
        ("spot", "node", False, EndReason.INTERRUPTED),
        ("on_demand", "node", False, EndReason.FAILED),  # nobody sells on-demand nodes to somebody else
        ("on_demand", "preempted", False, EndReason.INTERRUPTED),
        ("spot", "failed", False, EndReason.FAILED),
        ("spot", "start", False, EndReason.FAILED),
        ("spot", "exited", False, EndReason.TERMINATED),
        ("spot", "killed", False, EndReason.TERMINATED),
        ("spot", "failed", True, EndReason.TERMINATED),
    ],
)
def test_why_it_ended(market: str, cause: Cause, asked: bool, expected: EndReason) -> None:
    instance = seen(actor("DEAD", market=market, cause=cause, end_s=1_050.0), asked=asked)
    assert (instance.state, instance.ended_s, instance.end_reason) == (InstanceState.ENDED, 1_050.0, expected)


def test_an_actor_costs_from_when_it_runs() -> None:
    waiting = replace(actor("PENDING_CREATION"), started=False)
    assert seen(waiting).costs_from_s == NOW_S
    never = replace(actor("DEAD", cause="killed", end_s=1_050.0), started=False)
    assert seen(never).costs_from_s == seen(never).ended_s == 1_050.0, "it has never cost anything"
    assert seen(replace(actor(), start_s=1_010.0)).costs_from_s == 1_010.0
    assert seen(replace(actor("DEAD", cause="start", end_s=1_050.0), detail="no doll")).trouble == "no doll"


def test_a_drained_node_is_a_notice_until_the_worker_has_left() -> None:
    noticed = seen(actor(), draining={"n1": 1_130.0, "n2": 1_001.0})
    assert (noticed.notice_s, noticed.is_alive) == (1_130.0, True)
    left = seen(actor("DEAD", cause="exited", end_s=1_104.0), noticed)  # the node, too, has left the list
    assert (left.end_reason, left.ended_s) == (EndReason.INTERRUPTED, 1_104.0)
    assert seen(actor("DEAD", cause="failed", end_s=2_000.0), left) == left, "what has ended does not change"


def test_a_drain_without_a_deadline_has_one_that_stays() -> None:
    noticed = seen(actor(), draining={"n1": 0.0})
    assert noticed.notice_s == NOW_S + actors.NO_DEADLINE_S
    assert actors.instance_of(actor(), noticed, {"n1": 0.0}, False, NOW_S + 50) == noticed


def test_an_actor_without_a_process_has_no_notice() -> None:
    waiting = replace(actor("PENDING_CREATION"), started=False)
    assert seen(waiting, draining={"n1": 1_130.0}).notice_s is None, "Ray places it elsewhere"


def test_one_whose_end_was_asked_for_is_not_alive_any_more() -> None:
    assert seen(actor(), asked=True).state is InstanceState.ENDING


@pytest.mark.parametrize("wrong", [{"doll-market": "cheap"}, {"doll-worker": "x"}, {"doll-launched-ms": ""}])
def test_labels_of_somebody_else_are_no_worker(wrong: dict[str, str]) -> None:
    other = replace(actor(), labels={**actor().labels, **wrong})
    assert actors.instance_of(other, None, {}, False, NOW_S) is None
