"""Workers with several machines on a market: up while all machines are, and preempted with any of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from doll.provisioner.traces.availability import Markov, all_up, pool_of_workers
from doll.provisioner.traces.market import SpotMarket
from doll.provisioner.traces.model import Pool, Series, constant
from doll.theory.cost import Prices
from doll.theory.preemption import gang_availability
from hypothesis import given
from hypothesis import strategies as st

from doll_lab.simulation.availability import RecordedAvailability, WholeWorkers

PRICES = Prices(0.158, 0.286)
SPANS = st.lists(st.tuples(st.booleans(), st.integers(1, 20).map(float)), min_size=1, max_size=12)


def then_down(spans: list[tuple[bool, float]]) -> Iterator[tuple[bool, float]]:
    return itertools.chain(spans, itertools.repeat((False, 1000.0)))


def is_up(spans: list[tuple[bool, float]], at_s: float) -> bool:
    for up, seconds in spans:
        if at_s < seconds:
            return up
        at_s -= seconds
    return False


@given(st.lists(SPANS, min_size=1, max_size=4))
def test_a_worker_is_up_at_a_time_if_and_only_if_all_of_its_machines_are(
    machines: list[list[tuple[bool, float]]],
) -> None:
    at_s, end_s = 0.0, max(sum(seconds for _, seconds in spans) for spans in machines)
    for up, seconds in all_up([then_down(spans) for spans in machines]):
        for inside_s in (at_s, at_s + seconds - 0.5):
            assert up == all(is_up(spans, inside_s) for spans in machines)
        at_s += seconds
        if at_s > end_s:
            return


def test_a_gang_of_the_chain_has_the_availability_of_the_formula() -> None:
    for machines in (2, 4):
        market = SpotMarket.chain(6, PRICES, alpha=0.9, cycle_s=1000.0, machines_per_slot=machines, seed=1)
        expected = gang_availability(machines, 0.9, 1000.0)
        assert market.alpha == expected.alpha
        up_s = total_s = 0.0
        interruptions = 0
        for slot in range(6):
            at_s = 0.0
            while at_s < 300_000.0:
                interval = market.interval(slot, at_s)
                up_s += interval.up * (interval.end_s - at_s)
                interruptions += interval.up
                at_s = interval.end_s
            total_s += at_s
        assert up_s / total_s == pytest.approx(expected.alpha, abs=0.02)
        assert total_s / interruptions == pytest.approx(expected.cycle_s, rel=0.05)


def test_machines_that_go_together_are_one_chain() -> None:
    together = SpotMarket.chain(
        3, PRICES, alpha=0.9, cycle_s=1000.0, machines_per_slot=4, one_by_one=False, no_notice_share=0.5
    )
    one = SpotMarket.chain(3, PRICES, alpha=0.9, cycle_s=1000.0, no_notice_share=0.5)
    assert together.alpha == one.alpha == 0.9
    for slot in range(3):
        for at_s in range(0, 20_000, 50):
            assert together.interval(slot, float(at_s)) == one.interval(slot, float(at_s))


def test_the_slots_of_a_simulation_have_machines_of_their_own() -> None:
    class Written:
        def spans(self, slot: int) -> Iterator[tuple[bool, float]]:
            # Machine 4 is away from second 10 on; it belongs to the second worker of three machines.
            yield from [(True, 10.0), (slot != 4, 1e9)]
            while True:
                yield slot != 4, 1e9

    workers = WholeWorkers(Written(), 3)
    up_at_11 = [list(itertools.islice(workers.spans(slot), 2))[1][0] for slot in range(3)]
    assert up_at_11 == [True, False, True]


def pool(machines: int, num_up: list[float]) -> Pool:
    times_s = np.arange(len(num_up) + 1, dtype=np.float64) * 100.0
    return Pool("p", machines, 0.3, constant(0.1, 0.0, 100.0 * len(num_up)), Series(times_s, np.array([*num_up, 0.0])))


def test_recorded_machines_are_so_many_whole_workers() -> None:
    recorded = pool(12, [12, 11, 9, 2])
    workers = pool_of_workers(recorded, 3, 4)
    assert workers.num_machines == 4
    assert workers.num_up.values.tolist() == [4, 3, 3, 0, 0]
    assert workers.alpha == pytest.approx((4 + 3 + 3 + 0) / 16)
    assert workers.on_demand_usd_per_hour == recorded.on_demand_usd_per_hour, "prices stay those of a machine"
    # At 11 of 12 machines three workers are whole; the last is not up at all.
    assert [
        next(iter_)[0] for iter_ in (RecordedAvailability.from_pool(workers, 4).spans(slot) for slot in range(4))
    ] == [True] * 4
    at_150_s = [
        list(itertools.islice(RecordedAvailability.from_pool(workers, 4).spans(slot), 2))[1][0] for slot in range(4)
    ]
    assert at_150_s == [True, True, True, False]


def test_a_recording_of_few_machines_stands_for_several_with_each() -> None:
    few = pool(2, [2, 1])
    assert pool_of_workers(few, 3, 4) is few
    assert pool_of_workers(few, 1, 2) is few
    market = SpotMarket.replay(few, 4, length_s=100.0, machines_per_slot=3)
    assert (market.machines_per_slot, market.on_demand_usd_per_h) == (3, pytest.approx(0.3))


def test_a_worker_with_one_machine_is_as_before() -> None:
    rng = np.random.default_rng(5)
    spans = list(itertools.islice(WholeWorkers(Markov(0.8, 100.0, rng), 1).spans(0), 50))
    assert spans == list(itertools.islice(Markov(0.8, 100.0, np.random.default_rng(5)).spans(0), 50))
