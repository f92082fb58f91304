"""From what is there to what is wanted: make before break, pauses, limits, launch_state."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, LaunchError, LaunchFailure, Order
from doll.provisioner.launch_state import LaunchLimits, LaunchState
from doll.provisioner.planning.state import Market
from doll.provisioner.reconcile import FleetAction, FleetStatus, Launch, Readiness, Terminate, Wait, reconcile

T0 = 1_700_000_000.0


def machine(incarnation: int = 1, market: Market = "spot", slot: int = 0, **more: Any) -> Instance:
    given: dict[str, Any] = {"pool": "a", "state": InstanceState.RUNNING, "launched_s": T0 - 100} | more
    return Instance(id=f"i{slot}.{incarnation}", slot=slot, incarnation=incarnation, market=market, **given)


def status(
    wanted: Sequence[Market | None], instances: Sequence[Instance], ready: str = "",
    *, silent_s: dict[str, float] | None = None, not_ready_s: dict[str, float] | None = None,
    incarnation_held: dict[int, int] | None = None, **more: Any,
) -> FleetStatus:  # fmt: skip
    """`ready`: ids with blanks between them."""
    ready_s = dict.fromkeys(ready.split(), T0 - 50)
    return FleetStatus(
        wanted=wanted, reasons=[f"reason {slot}" for slot in range(len(wanted))], instances=instances,
        readiness=Readiness(ready_s, silent_s or {}, not_ready_s or {}, incarnation_held or {}), **more,
    )  # fmt: skip


def decide(
    given: FleetStatus,
    launch_state: LaunchState | None = None,
    *,
    limits: LaunchLimits | None = None,
    now_s: float = T0,
) -> list[FleetAction]:
    limits = limits or LaunchLimits()
    if launch_state is None:
        launch_state = LaunchState(len(given.wanted), limits)
        for instance in given.instances:
            if instance.slot < len(given.wanted):
                launch_state.seen(instance.slot, instance.incarnation)
    return reconcile(given, launch_state, now_s)


def ends(actions: Sequence[FleetAction]) -> list[str]:
    return [action.id for action in actions if isinstance(action, Terminate)]


def orders(actions: Sequence[FleetAction]) -> list[tuple[int, int, Market]]:
    return [
        (action.order.slot, action.order.incarnation, action.order.market)
        for action in actions
        if isinstance(action, Launch)
    ]


def waits(actions: Sequence[FleetAction]) -> list[str]:
    return [action.why for action in actions if isinstance(action, Wait)]


# --- make before break ----------------------------------------------------------------------------------------------


def test_a_slot_without_a_machine_gets_one() -> None:
    assert orders(decide(status(["spot", "on_demand"], []))) == [(0, 1, "spot"), (1, 1, "on_demand")]


def test_what_is_as_wanted_is_left_alone() -> None:
    assert decide(status(["spot"], [machine()], "i0.1")) == []


def test_what_boots_is_waited_for() -> None:
    actions = decide(status(["spot"], [machine(state=InstanceState.PENDING)]))
    assert (ends(actions), orders(actions), waits(actions)) == ([], [], ["incarnation 1 (spot) boots"])


def test_a_move_launches_first_then_waits_then_ends() -> None:
    old, new = machine(1), machine(2, "on_demand")
    actions = decide(status(["on_demand"], [old], "i0.1"))
    assert (orders(actions), ends(actions)) == ([(0, 2, "on_demand")], [])
    actions = decide(status(["on_demand"], [old, new], "i0.1"))
    assert (orders(actions), ends(actions)) == ([], [])
    actions = decide(status(["on_demand"], [old, new], "i0.2"))
    assert (orders(actions), ends(actions)) == ([], ["i0.1"])


def test_a_plan_that_turns_back_ends_what_is_not_ready() -> None:
    """The old one serves and is wanted again."""
    actions = decide(status(["spot"], [machine(1), machine(2, "on_demand")], "i0.1"))
    assert (orders(actions), ends(actions)) == ([], ["i0.2"])


def test_a_plan_that_turns_back_too_late_replaces_again() -> None:
    """The new one has fenced the old one, which is of no use any more."""
    actions = decide(status(["spot"], [machine(1), machine(2, "on_demand")], "i0.2"))
    assert (orders(actions), ends(actions)) == ([], ["i0.1"])
    actions = decide(status(["spot"], [machine(2, "on_demand")], "i0.2"))
    assert (orders(actions), ends(actions)) == ([(0, 3, "spot")], [])


def test_two_that_boot_both_go_on_until_one_is_ready() -> None:
    actions = decide(status(["on_demand"], [machine(1), machine(2, "on_demand")]))
    assert (orders(actions), ends(actions)) == ([], [])
    actions = decide(status(["on_demand"], [machine(1), machine(2, "on_demand")], "i0.1"))
    assert (orders(actions), ends(actions)) == ([], []), "the first serves until the wanted one does"


def test_never_a_third_machine() -> None:
    doomed = machine(1, notice_s=T0 + 60)
    actions = decide(status(["on_demand"], [doomed, machine(2)], "i0.1"))
    assert (orders(actions), ends(actions)) == ([], [])
    assert waits(actions) == ["on_demand is wanted, but the slot has two machines"]


def test_a_useless_second_one_makes_room() -> None:
    serving, booting = machine(1, "on_demand"), machine(2, "on_demand")
    actions = decide(status(["spot"], [serving, booting], "i0.1"))
    assert (orders(actions), ends(actions)) == ([], ["i0.2"])


def test_a_machine_that_was_fenced_by_one_that_is_gone_is_ended() -> None:
    actions = decide(status(["spot"], [machine(1)], incarnation_held={0: 2}))
    assert ends(actions) == ["i0.1"]


# --- notices --------------------------------------------------------------------------------------------------------


def test_what_is_not_listed_yet_is_ended_once_it_is() -> None:
    """A notice would not show before."""
    actions = decide(status([None], [machine()], "i0.1", unlisted={"i0.1"}))
    assert ends(actions) == []
    assert waits(actions) == ["i0.1 is not listed yet, it is ended later: reason 0"]
    assert ends(decide(status([None], [machine()], "i0.1"))) == ["i0.1"]


def test_a_notice_is_answered_by_a_launch_and_never_by_an_end() -> None:
    doomed = machine(1, notice_s=T0 + 60)
    actions = decide(status(["spot"], [doomed], "i0.1"))
    assert (orders(actions), ends(actions)) == ([(0, 2, "spot")], [])
    assert decide(status(["spot"], [doomed, machine(2)], "i0.2")) == []
    assert decide(status([None], [doomed])) == []


# --- what nobody wants ----------------------------------------------------------------------------------------------


def test_orphans_are_ended() -> None:
    strange = [machine(1, slot=7), machine(1, slot=-1), machine(1, slot=9, notice_s=T0 + 9)]
    assert sorted(ends(decide(status(["spot"], [machine(), *strange], "i0.1")))) == ["i-1.1", "i7.1"]


def test_a_drain_ends_all_but_what_has_its_notice() -> None:
    actions = decide(status([None, None], [machine(), machine(slot=1, notice_s=T0 + 1), machine(2)], "i0.1"))
    assert sorted(ends(actions)) == ["i0.1", "i0.2"]
    assert orders(actions) == []


def test_ended_ones_are_not_there() -> None:
    gone = machine(state=InstanceState.ENDED, ended_s=T0, end_reason=EndReason.FAILED)
    assert orders(decide(status(["spot"], [gone]))) == [(0, 2, "spot")]
    leaving = machine(state=InstanceState.ENDING)
    assert orders(decide(status(["spot"], [leaving]))) == [(0, 2, "spot")]


# --- illness --------------------------------------------------------------------------------------------------------


def test_a_machine_whose_worker_never_joins_is_replaced() -> None:
    actions = decide(status(["spot"], [machine()], not_ready_s={"i0.1": 899.0}))
    assert orders(actions) == []
    actions = decide(status(["spot"], [machine()], not_ready_s={"i0.1": 901.0}))
    assert (orders(actions), ends(actions)) == ([(0, 2, "spot")], ["i0.1"]), "nothing depends on it"
    actions = decide(status(["spot"], [machine(), machine(2)], "i0.2", not_ready_s={"i0.1": 901.0}))
    assert ends(actions) == ["i0.1"]


def test_a_machine_whose_worker_is_silent_is_replaced_and_may_come_back() -> None:
    actions = decide(status(["spot"], [machine()], silent_s={"i0.1": 299.0}))
    assert orders(actions) == []
    actions = decide(status(["spot"], [machine()], silent_s={"i0.1": 301.0}))
    assert (orders(actions), ends(actions)) == ([(0, 2, "spot")], [])
    actions = decide(status(["spot"], [machine(), machine(2)], "i0.1"))
    assert ends(actions) == ["i0.2"], "it works again, so the second one is not needed"


def test_a_second_one_that_never_gets_ready_makes_room() -> None:
    actions = decide(status(["spot"], [machine(1, "on_demand"), machine(2)], "i0.1", not_ready_s={"i0.2": 901.0}))
    assert (orders(actions), ends(actions)) == ([], ["i0.2"])


# --- limits ---------------------------------------------------------------------------------------------------------


def test_those_that_cannot_work_come_first_when_not_all_can_be_launched() -> None:
    limits = LaunchLimits(launches_per_min=2)
    serving, doomed = machine(1, "on_demand", slot=0), machine(1, slot=1, notice_s=T0 + 9)
    actions = decide(status(["spot", "spot", "spot"], [serving, doomed], "i0.1 i1.1"), limits=limits)
    assert orders(actions) == [(2, 1, "spot"), (1, 2, "spot")]
    assert ["the limit of launches per minute is reached" in why for why in waits(actions)] == [True]


def test_launches_are_counted_by_the_minute() -> None:
    limits = LaunchLimits(launches_per_min=2)
    launch_state = LaunchState(4, limits)
    actions = decide(status(["spot"] * 4, []), launch_state, limits=limits)
    for action in actions:
        if isinstance(action, Launch):
            launch_state.ordered(action.order, T0, fallback=False)
            launch_state.launched(action.order)
    there = [machine(slot=0), machine(slot=1)]
    assert orders(decide(status(["spot"] * 4, there), launch_state, limits=limits, now_s=T0 + 59)) == []
    assert len(orders(decide(status(["spot"] * 4, there), launch_state, limits=limits, now_s=T0 + 61))) == 2


def test_fallbacks_are_held_back_but_not_when_the_deadline_is_in_danger() -> None:
    limits = LaunchLimits(fallbacks_per_min=1)
    spots = [machine(slot=slot) for slot in range(3)]
    calm = status(["on_demand"] * 3, spots, "i0.1 i1.1 i2.1")
    assert len(orders(decide(calm, limits=limits))) == 1
    urgent = status(["on_demand"] * 3, spots, "i0.1 i1.1 i2.1", urgent=True)
    assert len(orders(decide(urgent, limits=limits))) == 3
    fresh = status(["on_demand"] * 3, [])
    assert len(orders(decide(fresh, limits=limits))) == 3, "a slot without a machine does not fall back"


def test_the_budget_holds_launches_back() -> None:
    given = status(["spot"] * 3, [], spare_usd=0.25, commit_usd={"spot": 0.1, "on_demand": 0.2})
    actions = decide(given)
    assert len(orders(actions)) == 2
    assert "the budget has 0.050 USD left" in waits(actions)[0]


# --- launch_state ---------------------------------------------------------------------------------------------------


def error(failure: LaunchFailure, *pools: str) -> LaunchError:
    return LaunchError("failure of the test", failure=failure, pools=pools)


def after(
    failure: LaunchFailure, *pools: str, market: Market = "spot", slots: int = 2
) -> tuple[LaunchState, LaunchLimits]:
    limits = LaunchLimits()
    launch_state = LaunchState(slots, limits)
    order = launch_state.next_order(0, market, T0)
    launch_state.ordered(order, T0, fallback=False)
    launch_state.failed(order, error(failure, *pools), T0)
    return launch_state, limits


def test_no_capacity_avoids_the_pools_and_tries_again_with_a_new_attempt() -> None:
    launch_state, limits = after(LaunchFailure.CAPACITY, "a", "b")
    assert launch_state.next_order(0, "spot", T0 + 30) == Order(0, 1, "spot", 1, frozenset("ab"))
    assert launch_state.next_order(1, "spot", T0 + 1) == Order(1, 1, "spot", 0, frozenset("ab"))
    assert launch_state.next_order(0, "on_demand", T0 + 1).avoid == frozenset(), "dry on spot is not dry on demand"
    assert launch_state.avoided_pools("spot", T0 + limits.pool_backoff_s) == frozenset()
    wanted = status(["spot", "spot"], [machine(slot=1)])
    assert orders(decide(wanted, launch_state, now_s=T0 + 29)) == []
    assert orders(decide(wanted, launch_state, now_s=T0 + 30)) == [(0, 1, "spot")]
    assert launch_state.slots[0].no_capacity
    assert not launch_state.slots[1].no_capacity


def test_a_spot_quota_stops_spot_for_a_while_and_on_demand_not_at_all() -> None:
    launch_state, limits = after(LaunchFailure.SPOT_QUOTA)
    assert orders(decide(status(["spot", "spot"], []), launch_state, now_s=T0 + limits.quota_s - 1)) == []
    assert orders(decide(status(["on_demand", "on_demand"], []), launch_state)) == [
        (0, 1, "on_demand"),
        (1, 1, "on_demand"),
    ]
    assert len(orders(decide(status(["spot", "spot"], []), launch_state, now_s=T0 + limits.quota_s))) == 2


def test_an_on_demand_quota_gives_way_to_spot() -> None:
    launch_state, _ = after(LaunchFailure.ON_DEMAND_QUOTA, market="on_demand")
    actions = decide(status(["on_demand", "on_demand"], []), launch_state)
    assert [market for _, _, market in orders(actions)] == ["spot", "spot"]
    kept = decide(status(["on_demand", "on_demand"], [machine(), machine(slot=1)], "i0.1 i1.1"), launch_state)
    assert kept == [], "what is on spot stays there"


def test_an_answer_that_was_lost_is_asked_for_again_word_by_word() -> None:
    launch_state, limits = after(LaunchFailure.THROTTLED, "a")
    first = launch_state.pending[0][0]
    launch_state.failed(
        Order(1, 1, "spot"), error(LaunchFailure.CAPACITY, "z"), T0
    )  # pools to avoid have changed meanwhile
    assert launch_state.next_order(0, "spot", T0 + 10) == first
    assert launch_state.next_order(0, "on_demand", T0 + 10) == first, "first it must be known whether it is there"
    later = launch_state.next_order(0, "spot", T0 + limits.listing_lag_s + 1)
    assert (later.incarnation, later.attempt) == (2, 0), "its number may be taken"


def test_what_is_misconfigured_stops_everything() -> None:
    launch_state, _ = after(LaunchFailure.CONFIG)
    actions = decide(status(["spot", "on_demand"], []), launch_state, now_s=T0 + 3600)
    assert orders(actions) == []
    assert all(why.startswith("stopped: failure of the test") for why in waits(actions))


def test_early_ends_in_a_row_make_longer_and_longer_pauses() -> None:
    limits = LaunchLimits(early_s=100.0, max_early_ends=1, backoff_s=60.0, max_backoff_s=200.0)
    launch_state = LaunchState(1, limits)
    pauses = []
    for count in range(5):
        at_s = T0 + 10_000 * count
        launch_state.interrupted(machine(count + 1, launched_s=at_s - 50), at_s)
        pauses.append(max(0.0, launch_state.blocked_s(0, "spot") - at_s))
    assert pauses == [0, 60, 120, 200, 200]
    assert launch_state.blocked_s(0, "on_demand") == -math.inf
    launch_state.interrupted(machine(6, launched_s=T0), T0 + 100_000)
    launch_state.interrupted(machine(7, launched_s=T0 + 199_950), T0 + 200_000)
    assert launch_state.blocked_s(0, "spot") < T0 + 200_000, "one that lasted makes up for it"


def test_the_pool_that_took_a_machine_back_is_avoided() -> None:
    """SkyPilot #2234: the next launch must not go where the last one was taken."""
    launch_state = LaunchState(1, LaunchLimits())
    launch_state.seen(0, 1)
    launch_state.interrupted(machine(1), T0)
    assert launch_state.next_order(0, "spot", T0 + 1).avoid == {"a"}
    local = LaunchState(1, LaunchLimits(pool_backoff_s=0.0))
    local.interrupted(machine(1), T0)
    assert local.next_order(0, "spot", T0 + 1).avoid == frozenset()


def test_tries_in_vain_on_spot_do_not_hold_back_those_that_go_on_demand() -> None:
    launch_state = LaunchState(3, LaunchLimits(launches_per_min=2))
    for slot in (0, 1):
        order = Order(slot, 1, "spot")
        launch_state.ordered(order, T0, fallback=False)
        launch_state.failed(order, LaunchError("dry", failure=LaunchFailure.CAPACITY), T0)
    assert launch_state.launches_left(T0 + 1)[:2] == (2, 0)
    launch_state.ordered(Order(2, 1, "on_demand"), T0 + 1, fallback=False)
    assert launch_state.launches_left(T0 + 2)[:2] == (1, 0)
    assert launch_state.launches_left(T0 + 60)[:2] == (1, 1)


def test_terms_only_grow() -> None:
    launch_state = LaunchState(1, LaunchLimits())
    launch_state.seen(0, 7)
    launch_state.seen(0, 3)
    assert launch_state.next_order(0, "spot", T0).incarnation == 8


def test_a_restart_forgets_nothing() -> None:
    launch_state, limits = after(LaunchFailure.CAPACITY, "a")
    launch_state.ordered(Order(1, 4, "on_demand", 2, frozenset("q")), T0 + 1, fallback=True)
    launch_state.interrupted(machine(1, slot=1, launched_s=T0), T0 + 2)
    again = LaunchState(2, limits)
    again.restore(json.loads(json.dumps(launch_state.to_dict())))
    assert again.to_dict() == launch_state.to_dict()
    assert again.pending == launch_state.pending
    assert again.launches_left(T0 + 3) == launch_state.launches_left(T0 + 3)
    for slot in (0, 1):
        for market in ("spot", "on_demand"):
            assert again.blocked_s(slot, market) == launch_state.blocked_s(slot, market)
            assert again.next_order(slot, market, T0 + 3) == launch_state.next_order(slot, market, T0 + 3)
    with pytest.raises(ValueError, match="expected 3 slots, got 2"):
        LaunchState(3, limits).restore(launch_state.to_dict())


def test_a_person_who_starts_it_again_ends_the_pause() -> None:
    launch_state, limits = after(LaunchFailure.CONFIG)
    again = LaunchState(2, limits)
    again.restore(launch_state.to_dict())
    assert again.stopped == ""
