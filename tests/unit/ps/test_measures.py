"""Staleness, blocked time and bytes of whole jobs in virtual time, under every registered policy."""

from __future__ import annotations

import pytest
from doll.config.policy import PolicyConfig
from doll.ps.policies.asp import AspPolicyConfig
from doll.ps.policies.bsp import BspPolicyConfig
from doll.records import Measures
from doll.simulation.settings import SimulationSettings
from doll.simulation.system import System
from engine_world import POLICIES


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


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_measured(name: str) -> None:
    measures = simulated(POLICIES[name], [10.0] * 4, arrival_scv=1.0, random_phase=True)
    assert sum(measures.staleness.values()) + measures.older_reads > 100
    assert measures.older_reads == 0
    assert measures.computing_s > 0
    assert measures.blocked_s >= 0
