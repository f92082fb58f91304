"""Workers over a network: by hand where the times are exact; the bounds that hold whatever the messages take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from benchmarks.paper.factor_steps import FactorSteps
from benchmarks.paper.factorization import Floats, low_rank
from benchmarks.paper.network import NetworkedSystem, Read, clock_times
from doll.config.policy import PolicyConfig
from doll.ps.policies.essp import EsspPolicyConfig
from doll.ps.policies.ssp import SspPolicyConfig
from engine_invariants import check_engine


def at_speeds(config: PolicyConfig, seconds: Sequence[float], clocks: int, read: Read = "asks") -> NetworkedSystem:
    """Workers of constant speed, and a network that takes no time."""
    return NetworkedSystem(
        config, workers=len(seconds), clocks=clocks, compute=lambda worker, batch: seconds[worker], latency_s=0.0,
        read=read, seed=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "read"), [(SspPolicyConfig(staleness=2), "asks"), (EsspPolicyConfig(staleness=2), "waits")]
)
def test_a_fast_worker_waits_for_the_slow_one_when_it_is_s_ahead(config: PolicyConfig, read: Read) -> None:
    system = at_speeds(config, [1.0, 3.0], clocks=10, read=read)
    system.run()
    # The fast worker's batch t begins when the slow one has t - 2 in the model, at 3 (t - 2) s: from t = 3 on it waits.
    assert system.now == 30.0
    assert system.computing_s == [10.0, 30.0]
    assert system.blocked_s == [3.0 * 7 - 9.0, 0.0]
    assert system.engine.snapshot(system.now).applied == (12, 10)


def test_workers_of_one_speed_never_wait_where_messages_take_no_time() -> None:
    system = at_speeds(SspPolicyConfig(staleness=1), [1.0] * 3, clocks=8)
    system.run()
    assert (system.now, system.blocked_share) == (8.0, 0.0)


def test_a_message_takes_its_time_and_a_worker_with_fresh_weights_sends_none() -> None:
    """One worker: SSP(s) asks when its weights are more than s of its own clocks old; ESSP is sent them meanwhile."""
    blocked = {}
    cases: list[tuple[PolicyConfig, Read]] = [
        (SspPolicyConfig(staleness=4), "asks"),
        (EsspPolicyConfig(staleness=4), "waits"),
    ]
    for config, read in cases:
        system = NetworkedSystem(
            config, workers=1, clocks=3_000, compute=lambda worker, batch: 1.0, latency_s=0.1, read=read, seed=1
        )
        system.run()
        blocked[config.name] = sum(system.blocked_s)
    asked = 3_000 / 5  # with weights of its clock t it computes t to t + 4, if its last push has come before it asks
    assert blocked["ssp"] == pytest.approx(asked * 2 * 0.1, rel=0.15)
    assert blocked["essp"] == 0.0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("config", "read"), [(SspPolicyConfig(staleness=3), "asks"), (EsspPolicyConfig(staleness=3), "waits")]
)
def test_no_read_is_outside_of_the_bounds_and_the_ledger_holds(config: PolicyConfig, read: Read, seed: int) -> None:
    system = NetworkedSystem(
        config, workers=5, clocks=60, compute=clock_times(np.random.default_rng(seed), shape=2.0, doubled=0.3),
        latency_s=1.0, read=read, seed=seed,
    )  # fmt: skip
    handle = system.engine.handle

    def checked(event: object, now: float) -> object:
        actions = handle(event, now)  # type: ignore[arg-type]
        check_engine(system.engine)
        return actions

    system.engine.handle = checked  # type: ignore[method-assign, assignment]
    system.run()
    assert min(system.histogram.counts) == -4
    assert 0 < max(system.histogram.counts) <= 3
    assert min(system.engine.snapshot(system.now).applied) == 60
    assert system.engine.finished == "clocks"


@pytest.mark.parametrize(
    ("config", "read"), [(SspPolicyConfig(staleness=3), "asks"), (EsspPolicyConfig(staleness=3), "waits")]
)
def test_one_worker_learns_as_a_plain_program_does(config: PolicyConfig, read: Read) -> None:
    """Whatever the network takes: it sees its own steps at once."""
    problem = low_rank(30, 20, 3, 0.5, 0.1, np.random.default_rng(1))
    steps = FactorSteps(problem, workers=1, share=0.1, rate=0.05, seed=2)
    plain = steps.parameters.copy()
    for batch in range(40):
        plain += steps.step(0, batch, plain)
    system = NetworkedSystem(
        config, workers=1, clocks=40, compute=lambda worker, batch: 1.0, latency_s=2.0, read=read, seed=3, steps=steps
    )
    system.run()
    assert np.allclose(steps.parameters, plain, rtol=1e-9)
    assert steps.included == [40]


def test_the_server_adds_every_step_once() -> None:
    class Counting(FactorSteps):
        def step(self, worker: int, batch: int, view: Floats) -> Floats:
            step = np.zeros_like(self.parameters)
            step[worker] = 1.0
            return step

    steps = Counting(low_rank(30, 20, 3, 0.5, 0.1, np.random.default_rng(1)), workers=4, share=0.1, rate=0.0, seed=2)
    begin = steps.parameters.copy()
    system = NetworkedSystem(
        EsspPolicyConfig(staleness=2), workers=4, clocks=30, compute=clock_times(np.random.default_rng(4)),
        latency_s=0.3, read="waits", seed=5, steps=steps,
    )  # fmt: skip
    system.run()
    applied = system.engine.snapshot(system.now).applied
    assert np.allclose((steps.parameters - begin)[:4], applied)
    assert sum(applied) == steps.version == system.version


def test_steps_of_a_version_that_is_gone_cannot_be_published() -> None:
    steps = FactorSteps(low_rank(30, 20, 3, 0.5, 0.1, np.random.default_rng(1)), workers=1, share=0.1, rate=0.1, seed=2)
    with pytest.raises(ValueError, match="expected version 0 to be published, got 1"):
        steps.publish(1)
