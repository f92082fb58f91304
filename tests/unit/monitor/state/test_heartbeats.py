"""Who is silent: of the roles that were heard, and have not said that they leave."""

from __future__ import annotations

from doll.monitor.state.heartbeats import RoleHeartbeats
from doll.process.metric_names import LEFT
from doll.records.control import Metric, TermStarted
from statuses import gone_worker, live_worker, server_status

T0 = 1_700_000_000.0


def heard(source: str, at_s: float = T0, **values: float) -> Metric:
    return Metric(source=source, values=values, time_s=at_s)


def test_a_role_is_silent_when_it_was_heard_and_is_not_any_more() -> None:
    beats = RoleHeartbeats()
    for record in (server_status(time_s=T0), heard("provisioner"), heard("stranger"), heard("provisioner", T0 - 5)):
        beats.feed(record)
    assert beats.silent(T0 + 20) == {}
    assert beats.silent(T0 + 100) == {"ps": 100.0}
    assert beats.silent(T0 + 130) == {"ps": 130.0, "provisioner": 130.0}, "no evaluator and no producer ever ran"
    beats.feed(heard("provisioner", T0 + 125))
    assert beats.ages_s(T0 + 130) == {"ps": 130.0, "provisioner": 5.0}
    assert beats.ages_s(T0 + 124)["provisioner"] == 0.0, "clocks differ"


def test_who_has_left_is_not_missed_until_it_is_heard_again() -> None:
    beats = RoleHeartbeats()
    for record in (heard("producer"), heard("producer", T0 + 1, **{LEFT: 1.0})):
        beats.feed(record)
    assert beats.ages_s(T0 + 1000) == {}
    beats.feed(heard("producer", T0 + 2))
    assert beats.silent(T0 + 1000) == {"producer": 998.0}


def test_workers_are_as_silent_as_the_parameter_server_says() -> None:
    beats = RoleHeartbeats()
    workers = [live_worker(0, silent_s=1.0), live_worker(12, silent_s=45.0), gone_worker(1)]
    beats.feed(server_status(workers, time_s=T0))
    assert beats.silent(T0) == {"worker-12": 45.0}
    beats.feed(server_status([live_worker(0, silent_s=1.0), live_worker(12, silent_s=0.5)], time_s=T0 + 1))
    assert beats.silent(T0 + 1) == {}


def test_a_new_generation_misses_nobody_of_the_one_before() -> None:
    beats = RoleHeartbeats()
    beats.feed(heard("evaluator"))
    beats.feed(TermStarted(term=3, resumed_version=0, origins=(0,), records_per_batch=1, time_s=T0 + 500, generation=3))
    beats.feed(server_status(term=1, time_s=T0 + 600))
    assert beats.ages_s(T0 + 1000) == {}


def test_a_joiner_may_be_silent_while_it_reads_its_state_and_not_for_longer() -> None:
    beats = RoleHeartbeats()
    for record in (heard("joiner-0", samples_total=1.0), heard("joiner-1"), heard("joiner-x"), heard("joiner")):
        beats.feed(record)
    beats.feed(heard("joiner-1", T0 + 1, **{LEFT: 1.0}))
    assert beats.silent(T0 + 100) == {}
    assert beats.silent(T0 + 130) == {"joiner-0": 130.0}
