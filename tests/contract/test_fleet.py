"""What every `Fleet` must do, on each adapter in its own world (`fleet_rigs.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from doll.errors import ServiceUnavailableError
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, LaunchFailure, Order
from fleet_rigs import RIGS, Rig, end_clusters, refused

SLOW_RIGS = {"kubernetes", "kubernetes-gangs", "lambda", "ray"}  # they start in 4 s, 1 s and 15 s


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW_RIGS else ()) for name in sorted(RIGS)]
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with RIGS[request.param]() as made:
        yield made
        made.fleet.close()


@pytest.fixture(scope="module", autouse=True)
def _clusters() -> Iterator[None]:
    yield
    end_clusters()


def need(rig: Rig, *abilities: str) -> None:
    missing = set(abilities) - rig.can
    if missing:
        pytest.skip(f"{type(rig).__name__}: its world has no {', '.join(sorted(missing))}")


def listed(rig: Rig) -> dict[str, Instance]:
    instances = list(rig.fleet.instances())
    assert len({instance.id for instance in instances}) == len(instances), "each instance once"
    return {instance.id: instance for instance in instances}


def alive(rig: Rig) -> set[str]:
    return {id_ for id_, instance in listed(rig).items() if instance.is_alive}


@pytest.mark.slow
def test_an_empty_fleet_has_no_instances(rig: Rig) -> None:
    assert listed(rig) == {}


@pytest.mark.slow
def test_what_was_launched_is_listed_at_once_with_its_identity(rig: Rig) -> None:
    orders = [Order(0, 1, "spot"), Order(7, 3, "on_demand"), Order(12, 2, "spot", attempt=4)]
    made = [rig.fleet.launch(order) for order in orders]
    by_id = listed(rig)
    assert set(by_id) == {instance.id for instance in made}
    for order, instance in zip(orders, made, strict=True):
        seen = by_id[instance.id]
        for each in (instance, seen):
            assert (each.slot, each.incarnation, each.market) == (order.slot, order.incarnation, order.market)
            assert each.is_alive
            assert (each.ended_s, each.end_reason, each.notice_s) == (None, EndReason.NONE, None)
            assert each.pool == instance.pool != ""
        assert abs(seen.launched_s - instance.launched_s) < 60


def test_an_instance_boots_and_runs(rig: Rig) -> None:
    need(rig, "boot")
    instance = rig.fleet.launch(Order(0, 1, "spot"))
    assert instance.state is InstanceState.PENDING
    rig.advance(60)
    assert listed(rig)[instance.id].state is InstanceState.RUNNING


@pytest.mark.slow
def test_the_same_order_launches_once(rig: Rig) -> None:
    order = Order(3, 2, "spot")
    first = rig.fleet.launch(order)
    assert rig.fleet.launch(order).id == first.id
    rig.advance(90)
    assert rig.fleet.launch(order).id == first.id
    assert set(listed(rig)) == {first.id}


@pytest.mark.slow
def test_the_same_order_after_a_crash_finds_its_instance(rig: Rig) -> None:
    order = Order(3, 2, "spot")
    first = rig.fleet.launch(order)
    rig.crash()
    assert rig.fleet.launch(order).id == first.id
    rig.advance(90)
    rig.crash()
    assert rig.fleet.launch(order).id == first.id
    assert alive(rig) == {first.id}


@pytest.mark.slow
def test_instances_outlive_the_provisioner(rig: Rig) -> None:
    made = {rig.fleet.launch(Order(slot, 1, "on_demand")).id for slot in range(3)}
    rig.advance(90)
    rig.fleet.close()
    rig.crash()
    assert alive(rig) == made


@pytest.mark.slow
def test_a_replacement_runs_beside_what_it_replaces(rig: Rig) -> None:
    old = rig.fleet.launch(Order(5, 1, "spot"))
    new = rig.fleet.launch(Order(5, 2, "on_demand"))
    assert alive(rig) == {old.id, new.id}
    rig.fleet.terminate([old.id])
    assert alive(rig) == {new.id}


@pytest.mark.slow
def test_terminated_ones_end_and_are_listed_for_a_while(rig: Rig) -> None:
    gone, stays = (rig.fleet.launch(Order(slot, 1, "spot")) for slot in range(2))
    rig.advance(60)
    before_s = listed(rig)[gone.id].launched_s
    rig.fleet.terminate([gone.id])
    assert alive(rig) == {stays.id}, "at once, whatever the owner's listing says"
    rig.fleet.terminate([gone.id, "i-0123456789abcdef0"])
    rig.fleet.terminate([])
    rig.advance(90)
    by_id = listed(rig)
    assert (by_id[gone.id].state, by_id[gone.id].end_reason) == (InstanceState.ENDED, EndReason.TERMINATED)
    ended_s = by_id[gone.id].ended_s
    assert ended_s is not None
    assert before_s < ended_s <= before_s + 200
    rig.advance(3000)
    assert listed(rig)[gone.id] == by_id[gone.id], "what has ended does not change"
    assert alive(rig) == {stays.id}


@pytest.mark.slow
def test_what_is_gone_before_it_is_listed_again_was_terminated(rig: Rig) -> None:
    instance = rig.fleet.launch(Order(0, 1, "spot"))
    rig.advance(60)
    assert alive(rig) == {instance.id}
    rig.fleet.terminate([instance.id])
    rig.advance(90)
    gone = listed(rig)[instance.id]
    assert (gone.state, gone.end_reason) == (InstanceState.ENDED, EndReason.TERMINATED)


@pytest.mark.slow
def test_terminating_works_after_a_crash_too(rig: Rig) -> None:
    one, two = (rig.fleet.launch(Order(slot, 1, "spot")) for slot in range(2))
    rig.advance(90)
    rig.crash()
    rig.fleet.terminate([one.id])
    rig.advance(90)
    assert alive(rig) == {two.id}


def test_a_machine_that_ends_by_itself_has_failed(rig: Rig) -> None:
    instance = rig.fleet.launch(Order(0, 1, "on_demand"))
    rig.advance(60)
    listed(rig)
    rig.fail_instance(instance.id)
    rig.advance(60)
    ended = listed(rig)[instance.id]
    assert (ended.state, ended.end_reason) == (InstanceState.ENDED, EndReason.FAILED)
    assert ended.ended_s is not None


def test_a_stopped_machine_is_not_forgotten_and_can_be_ended(rig: Rig) -> None:
    need(rig, "stop")
    instance = rig.fleet.launch(Order(0, 1, "on_demand"))
    rig.advance(60)
    listed(rig)
    rig.stop(instance.id)
    rig.advance(3 * 24 * 3600.0)
    stopped = listed(rig)[instance.id]
    assert (stopped.state, stopped.is_alive, stopped.is_endable) == (InstanceState.STOPPED, False, True)
    assert stopped.ended_s == pytest.approx(instance.launched_s + 60, abs=1), "it does not run since then"
    rig.fleet.terminate([instance.id])
    rig.advance(90)
    ended = listed(rig)[instance.id]
    assert (ended.state, ended.ended_s) == (InstanceState.ENDED, stopped.ended_s)


@pytest.mark.slow
def test_other_clusters_are_neither_seen_nor_touched(rig: Rig) -> None:
    strangers = rig.strangers()
    theirs = strangers.launch(Order(0, 1, "spot"))
    ours = rig.fleet.launch(Order(0, 1, "spot"))
    rig.advance(90)
    assert set(listed(rig)) == {ours.id}
    if theirs.id != ours.id:  # owners that give names cluster by cluster cannot mix them up
        rig.fleet.terminate([theirs.id])
        rig.advance(90)
    assert [instance.is_alive for instance in strangers.instances()] == [True]


@pytest.mark.slow
def test_a_second_job_on_the_cluster_takes_nobody_elses_machines_for_its_own(rig: Rig) -> None:
    need(rig, "jobs")
    ours = rig.fleet.launch(Order(0, 1, "spot", run="r1"))
    second = rig.second_job()
    theirs = second.launch(Order(0, 1, "spot", run="r2"))
    assert theirs.id != ours.id
    rig.advance(90)
    for fleet, job, own in ((rig.fleet, "digits", ours), (second, "ads", theirs)):
        assert [each.id for each in fleet.instances() if each.job in ("", job)] == [own.id]


@pytest.mark.slow
def test_a_machine_that_does_not_end_is_killed(rig: Rig) -> None:
    need(rig, "hang")
    instance = rig.fleet.launch(Order(0, 1, "on_demand"))
    rig.advance(60)
    listed(rig)
    rig.hang(instance.id)
    rig.fleet.terminate([instance.id])
    rig.advance(90)
    listed(rig)
    rig.advance(90)
    ended = listed(rig)[instance.id]
    assert (ended.state, ended.end_reason) == (InstanceState.ENDED, EndReason.TERMINATED)


def test_pools_to_avoid_are_avoided(rig: Rig) -> None:
    need(rig, "pools")
    first = rig.fleet.launch(Order(0, 1, "spot"))
    second = rig.fleet.launch(Order(0, 2, "spot", avoid=frozenset({first.pool})))
    assert second.pool != first.pool


def test_a_dry_market_says_which_pools_and_the_other_market_is_open(rig: Rig) -> None:
    need(rig, "dry")
    rig.run_dry("spot")
    error = refused(rig.fleet, Order(0, 1, "spot"))
    assert error.failure is LaunchFailure.CAPACITY
    assert error.code
    assert error.pools
    assert listed(rig) == {}
    assert rig.fleet.launch(Order(0, 1, "on_demand", attempt=1)).pool in error.pools


def test_too_many_calls_and_the_same_order_again(rig: Rig) -> None:
    need(rig, "throttle")
    rig.throttle()
    order = Order(0, 1, "spot")
    assert refused(rig.fleet, order).failure is LaunchFailure.THROTTLED
    made = rig.fleet.launch(order)
    assert alive(rig) == {made.id}


def test_a_lost_answer_and_the_same_order_again_is_one_instance(rig: Rig) -> None:
    need(rig, "lose_answer")
    order = Order(0, 1, "spot")
    rig.lose_answer()
    assert refused(rig.fleet, order).failure is LaunchFailure.THROTTLED
    made = rig.fleet.launch(order)
    rig.advance(90)
    assert alive(rig) == {made.id}


@pytest.mark.slow
def test_a_lost_answer_and_a_crash_and_the_same_order_is_one_instance(rig: Rig) -> None:
    need(rig, "lose_answer")
    order = Order(0, 1, "spot")
    rig.lose_answer()
    refused(rig.fleet, order)
    rig.crash()
    made = rig.fleet.launch(order)
    rig.advance(90)
    assert alive(rig) == {made.id}


def test_an_owner_that_does_not_answer_is_no_surprise(rig: Rig) -> None:
    need(rig, "away")
    instance = rig.fleet.launch(Order(0, 1, "spot"))
    rig.advance(90)
    rig.become_unavailable()
    with pytest.raises(ServiceUnavailableError):
        rig.fleet.instances()
    assert alive(rig) == {instance.id}


def test_an_interruption_has_a_notice_and_an_end(rig: Rig) -> None:
    need(rig, "interrupt")
    taken, stays = (rig.fleet.launch(Order(slot, 1, "spot")) for slot in range(2))
    rig.advance(600)
    listed(rig)
    asked_s = rig.now_s
    rig.interrupt(taken.id)
    rig.advance(10)
    by_id = listed(rig)
    assert by_id[taken.id].is_alive
    assert by_id[taken.id].notice_s is not None
    assert by_id[stays.id].notice_s is None
    notice_s = by_id[taken.id].notice_s or 0.0
    assert 0 < notice_s - asked_s < 200
    rig.advance(150)
    by_id = listed(rig)
    assert (by_id[taken.id].state, by_id[taken.id].end_reason) == (InstanceState.ENDED, EndReason.INTERRUPTED)
    assert by_id[taken.id].ended_s == pytest.approx(notice_s, abs=60)
    assert alive(rig) == {stays.id}


def test_an_interruption_without_a_notice_shows_all_the_same(rig: Rig) -> None:
    need(rig, "interrupt")
    instance = rig.fleet.launch(Order(0, 1, "spot"))
    rig.advance(600)
    rig.interrupt(instance.id, announced=False)
    rig.advance(60)
    assert listed(rig)[instance.id].notice_s is None
    rig.advance(120)
    ended = listed(rig)[instance.id]
    assert (ended.state, ended.end_reason) == (InstanceState.ENDED, EndReason.INTERRUPTED)
