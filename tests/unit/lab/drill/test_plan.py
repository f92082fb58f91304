"""A drill's plan: one seed, one plan; every kind comes; nothing is broken that is not ours."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doll_lab.drill.plan import FAULT_KINDS, FaultTarget, Link, make_plan

ALL: set[FaultTarget] = {"worker", "ps", "producer", "evaluator", "redis", "kafka", "stream", "broker"}
# No worker is a pipeline, and the model has no shards.
KINDS = [kind for kind in FAULT_KINDS if kind.target not in ("stage", "shard")]
# One broker, and no control links.
OF_ONE = [kind for kind in KINDS if kind.target != "broker" and kind.link is None]


@given(faults=st.integers(1, 300), seed=st.integers(0, 10_000), workers=st.integers(1, 9))
def test_a_plan_has_its_length_and_is_the_same_for_the_same_seed(faults: int, seed: int, workers: int) -> None:
    plan = make_plan(faults, seed, workers=workers, targets=ALL)
    assert plan == make_plan(faults, seed, workers=workers, targets=ALL)
    assert [fault.number for fault in plan] == list(range(1, faults + 1))
    for fault in plan:
        assert 0 <= fault.worker < workers
        assert fault.kind.hold_s[0] <= fault.hold_s <= fault.kind.hold_s[1]
        assert fault.gap_s > 0
    kinds = {fault.kind.name for fault in plan}
    assert len(kinds) == min(faults, len(OF_ONE)) or faults > len(OF_ONE)
    assert faults < len(OF_ONE) or kinds == {kind.name for kind in OF_ONE}


def test_other_seeds_give_other_plans() -> None:
    plans = {make_plan(30, seed, workers=4, targets=ALL) for seed in range(20)}
    assert len(plans) == 20


def test_weights_decide_in_the_long_run() -> None:
    counted = Counter(fault.kind.name for fault in make_plan(20_000, 1, workers=4, targets=ALL))
    total = sum(kind.weight for kind in OF_ONE)
    for kind in OF_ONE:
        assert counted[kind.name] / 20_000 == pytest.approx(kind.weight / total, rel=0.2)


def test_only_the_targets_that_are_named_are_broken() -> None:
    plan = make_plan(500, 3, workers=2, targets={"worker", "redis"})
    assert {fault.kind.target for fault in plan} == {"worker", "redis"}
    # Connections to a Kafka that is not ours are left alone too.
    assert {fault.kind.cut_from for fault in plan} == {None, "redis"}
    assert {fault.cut for fault in plan if fault.kind.cut_from} == {"silent", "reset"}


def test_faults_of_some_targets_cut_these_from_every_service() -> None:
    plan = make_plan(500, 3, workers=2, targets=ALL, only="worker")
    assert {fault.kind.target for fault in plan} == {"worker"}
    assert {fault.kind.cut_from for fault in plan} == {None, "redis", "kafka"}
    with pytest.raises(ValueError, match=r"one target, got 1 and stage"):
        make_plan(1, 3, workers=2, targets=ALL, only="stage")
    with pytest.raises(ValueError, match="at least one fault"):
        make_plan(0, 3, workers=2, targets=ALL)
    with pytest.raises(ValueError, match="one target"):
        make_plan(1, 3, workers=2, targets=set())


def test_where_there_is_a_standby_nothing_else_succeeds_a_frozen_server() -> None:
    kinds = {fault.kind.name for fault in make_plan(500, 3, workers=2, targets=ALL, standby=True)}
    assert kinds == {kind.name for kind in OF_ONE} - {"ps_zombie"}


def test_of_several_brokers_one_is_broken_and_not_kafka_as_a_whole() -> None:
    plan = make_plan(500, 3, workers=2, targets=ALL, brokers=3)
    kinds = {fault.kind.name for fault in plan}
    assert kinds == {kind.name for kind in KINDS if kind.link is None} - {"kafka_kill", "kafka_freeze"}
    broken = {fault.role for fault in plan if fault.kind.target == "broker"}
    assert broken == {"broker-1", "broker-2", "broker-3"}
    assert {fault.role for fault in plan if fault.kind.target == "stream"} == {"stream-0", "stream-1"}


def test_what_cannot_be_had_is_left_out() -> None:
    plan = make_plan(300, 3, workers=2, targets=ALL, without={"stream_poison"})
    assert {fault.kind.name for fault in plan} == {kind.name for kind in OF_ONE} - {"stream_poison"}


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        (["local"], {"worker_cut_control", "ps_cut_control"}),
        (["redis"], {"redis_delete_streams"}),
        (["local", "redis"], {"worker_cut_control", "ps_cut_control", "redis_delete_streams"}),
    ],
)
def test_the_control_links_that_the_job_uses_break_too(links: list[Link], expected: set[str]) -> None:
    plan = make_plan(500, 3, workers=2, targets=ALL, links=links)
    assert {fault.kind.name for fault in plan} == {kind.name for kind in OF_ONE} | expected
    cuts = {fault.cut for fault in plan if fault.kind.cut_from == "control"}
    assert cuts == ({"silent", "reset", "removed"} if "local" in links else set())
    assert "removed" not in {fault.cut for fault in plan if fault.kind.cut_from != "control"}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("link", ["local", "redis"])
def test_in_a_drill_of_200_faults_the_control_channel_dies_15_times(seed: int, link: Link) -> None:
    plan = make_plan(200, seed, workers=4, targets=ALL, links=[link])
    deaths = [
        fault
        for fault in plan
        if fault.kind.link == link or (link == "redis" and "redis" in (fault.kind.target, fault.kind.cut_from))
    ]
    assert len(deaths) >= 15


def test_other_kinds_keep_their_shares_among_themselves() -> None:
    plan = make_plan(20_000, 1, workers=4, targets=ALL, links=["local"])
    counted = Counter(fault.kind.name for fault in plan if fault.kind.link is None)
    total = sum(kind.weight for kind in OF_ONE)
    for kind in OF_ONE:
        assert counted[kind.name] / counted.total() == pytest.approx(kind.weight / total, rel=0.2)


def test_stages_die_where_workers_are_pipelines() -> None:
    plan = make_plan(300, 3, workers=2, targets={*ALL, "stage"}, stages=3)
    of_stages = [fault for fault in plan if fault.kind.target == "stage"]
    assert {fault.kind.action for fault in of_stages} == {"kill", "freeze", "preempt"}
    assert {(fault.worker, fault.stage) for fault in of_stages} == {(w, s) for w in range(2) for s in range(3)}
    assert {fault.role for fault in of_stages} == {"worker-0", "worker-1"}
    assert not [
        fault for fault in make_plan(300, 3, workers=2, targets={*ALL, "stage"}) if fault.kind.target == "stage"
    ]
