"""Staleness, blocked time and bytes of whole jobs in virtual time, under every registered policy."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from doll.config.policy import PolicyConfig, policy_section
from doll.monitor.state.policy_summary import PolicySummary
from doll.provisioner.traces.availability import Markov
from doll.ps.engine.engine import Engine
from doll.ps.engine.events import ApplyUpdate
from doll.ps.engine.measures import PolicyMeasures
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies import make_policy
from doll.ps.policies.asp import AspPolicyConfig
from doll.ps.policies.bsp import BspPolicyConfig
from doll.ps.policies.vap import VapPolicyConfig
from doll.records.control import Join, Measures
from doll.theory.staleness import ALL_UP_TO
from engine_world import POLICIES
from pushes import applied_set, push_of
from record_builders import announce

from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System

pytestmark = pytest.mark.slow  # loads torch


def simulated(policy: PolicyConfig, rates_per_s: list[float], **changes: object) -> Measures:
    """A batch of ten samples takes a second at 10 samples/s; a gradient a quarter of a second; nothing is random."""
    settings: dict[str, object] = {
        "batch_size": 10, "arrival_scv": 0.0, "compute_s": 0.25, "compute": "constant", "random_phase": False,
        "seconds": 100.0,
    }  # fmt: skip
    system = System(
        SimulationSettings(rates_per_s=rates_per_s, policy=policy, **(settings | changes)),  # type: ignore[arg-type]
        measure=True,
    )
    system.run()
    assert system.measures is not None
    return system.measures.report()


@pytest.mark.parametrize("workers", [3, 20])
def test_bulk_synchronous_reads_are_never_stale(workers: int) -> None:
    random = {"arrival_scv": 1.0, "compute": "exponential", "random_phase": True}
    measures = simulated(BspPolicyConfig(), [10.0] * workers, **random)
    assert set(measures.staleness) == {-1}
    assert measures.older_reads == 0
    assert measures.staleness_total == -sum(measures.staleness.values())


def test_a_fast_worker_is_blocked_while_the_slow_one_collects_its_batch() -> None:
    """Rounds of 2 s, which end a quarter of a second after the slow worker's batch. The fast one has a batch every
    second. Its second one is complete 0.25 s before the first round ends, its third one 1.25 s before the second one
    does; from then on one always waits, and it is idle for 1.75 s of a round. The slow one never waits."""
    measures = simulated(BspPolicyConfig(), [10.0, 5.0])
    updates = 49  # the first at 2.25 s, the last at 98.25 s
    assert measures.computing_s == pytest.approx(2 * 0.25 * updates)
    assert measures.blocked_s == pytest.approx(0.25 + 1.25 + 1.75 * (updates - 3))


def test_nobody_is_blocked_who_may_always_go_on() -> None:
    measures = simulated(AspPolicyConfig(), [10.0, 5.0])
    assert measures.blocked_s == pytest.approx(0.0)
    assert measures.computing_s == pytest.approx(0.25 * (99 + 49))


def test_the_streams_of_a_policy_without_a_bound_drift_apart() -> None:
    """One worker is at twice the clock of the other: the reads of each show it."""
    measures = simulated(AspPolicyConfig(), [10.0, 5.0])
    assert min(measures.staleness) < -40
    assert max(measures.staleness) > 40


@pytest.mark.parametrize("name", ["ssp", "essp"])
@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("workers", [4, 20])
def test_no_read_is_outside_of_the_bound(name: str, bound: int, workers: int) -> None:
    """A worker may push batch c + s before it waits, and reads at batch c everything below c - s."""
    rates = [10.0, 14.0, 12.0, 18.0] * (workers // 4)
    random = {"arrival_scv": 1.0, "compute": "exponential", "random_phase": True}
    measures = simulated(policy_section(name)(name=name, staleness=bound), rates, **random)  # type: ignore[call-arg]
    assert min(measures.staleness) >= -bound - 1
    assert max(measures.staleness) <= bound
    assert -bound - 1 in measures.staleness
    assert measures.older_reads == 0


def test_eager_weights_are_fresher() -> None:
    rates = [10.0, 14.0, 12.0, 18.0]
    means = []
    for name in ("ssp", "essp"):
        counts = simulated(policy_section(name)(name=name, staleness=8), rates).staleness  # type: ignore[call-arg]
        means.append(sum(difference * count for difference, count in counts.items()) / sum(counts.values()))
    assert means[1] > means[0] + 1.0


@pytest.mark.parametrize("name", ["bsp", "ssp", "essp", "isp"])
def test_nor_where_workers_come_and_go(name: str) -> None:
    """What a worker has missed while it was away makes nobody's weights stale."""
    config = policy_section(name)(name=name)
    bound = getattr(config, "staleness", -1)
    settings = SimulationSettings(
        rates_per_s=[10.0] * 6, batch_size=10, policy=config, compute_s=0.25, seconds=400.0, seed=3
    )
    preemption = Markov(0.7, 40.0, np.random.default_rng(3))
    system = System(settings, spot=[True] * 4 + [False] * 2, preemption=preemption, measure=True)
    system.run()
    assert system.preemptions > 10
    assert system.measures is not None
    staleness = system.measures.report().staleness
    assert sum(staleness.values()) > 1000
    assert set(staleness) <= set(range(-bound - 1, bound + 1)) | {-1}


def test_the_clocks_of_a_policy_outlive_the_server() -> None:
    """Worker 1 has joined 80 batches late: after a restart its clock is still that of the others."""
    config = policy_section("ssp")(name="ssp")
    settings = EngineSettings(
        num_workers=2, records_per_batch=1, max_pending_batches=8, lease_s=8.0, grant_timeout_s=8.0,
        checkpoint_every_updates=8, checkpoint_every_s=8.0,
    )  # fmt: skip
    fresh = Engine(settings, make_policy(config), term=1, now=0.0, origins=[0, 0]).snapshot(0.0)
    state = {"minimum": 99, "offsets": {"1": 80}, "reached": [[99, 120]]}
    snapshot = msgspec.structs.replace(fresh, version=120, applied=(100, 20), policy_state=state)
    engine = Engine(settings, make_policy(config), term=2, now=0.0, snapshot=snapshot)
    measures = PolicyMeasures(engine)
    for worker in (1, 0):
        engine.handle(Join(worker=worker, process=f"w{worker}"), 0.0)
        measures.joined(worker)
    session = [engine.worker(worker).session for worker in (0, 1)]
    for worker, batch in ((0, 100), (1, 20)):
        engine.handle(announce(worker, session[worker], batch, batch + 1), 0.0)
    for worker, batch in ((0, 100), (1, 20)):
        pushed = push_of(worker=worker, session=session[worker], term=2, version=120, batch=batch, grant_id=1, key="")
        measures.applied(ApplyUpdate(121, (applied_set(pushed),), 1.0, 0, 0))
    assert measures.report().staleness == {-1: 2}, "both have read a version with 100 batches' worth of either"


@pytest.mark.parametrize("name", ["asp", "vap", "ssp", "essp", "wsp"])
@pytest.mark.parametrize("workers", [4, 40])
@pytest.mark.parametrize("compute_s", [0.01, 0.9])
def test_every_read_is_counted(name: str, workers: int, compute_s: float) -> None:
    """Whether workers seldom have a batch, so that nobody waits for them, or nearly always."""
    system = System(
        SimulationSettings(
            rates_per_s=[10.0, 14.0, 6.0, 10.0] * (workers // 4), batch_size=10, policy=POLICIES[name],
            compute_s=compute_s, seconds=100.0,
        ),
        measure=True,
    )  # fmt: skip
    system.run()
    assert system.measures is not None
    summary = PolicySummary.total([system.measures.report()])
    assert summary is not None
    learned = sum(worker.applied for worker in system.engine.workers())
    assert learned > 200
    assert summary.staleness.reads == learned * (workers - 1 if workers <= ALL_UP_TO else 1)
    assert summary.staleness.counted_share == 1.0


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_measured(name: str) -> None:
    measures = simulated(POLICIES[name], [10.0] * 4, arrival_scv=1.0, random_phase=True)
    assert sum(measures.staleness.values()) + measures.older_reads > 100
    assert measures.older_reads == 0
    assert measures.computing_s > 0
    assert measures.blocked_s >= 0


def test_void_batches_are_counted_from_the_beginning_of_the_term() -> None:
    """The engine's own counter goes on from the checkpoint; several terms' measures are added up."""
    settings = EngineSettings(
        num_workers=1, records_per_batch=1, max_pending_batches=8, lease_s=8.0, grant_timeout_s=8.0,
        checkpoint_every_updates=8, checkpoint_every_s=8.0,
    )  # fmt: skip
    policy = VapPolicyConfig()
    fresh = Engine(settings, make_policy(policy), term=1, now=0.0, origins=[0]).snapshot(0.0)
    snapshot = msgspec.structs.replace(fresh, counters={"requeued_void": 5})
    engine = Engine(settings, make_policy(policy), term=2, now=0.0, snapshot=snapshot)
    measures = PolicyMeasures(engine)
    assert measures.report().void_batches == 0
    engine.counters["requeued_void"] += 2
    assert measures.report().void_batches == 2
