"""The scripts of ESSP and VAP: what is measured is the policies' doing, so that a wrong one fails a check."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import pytest
from benchmarks.paper import essp_fig1, essp_fig2, vap_bound
from benchmarks.paper.harness import Check
from benchmarks.paper.network import NetworkedSystem
from doll.ps.policies.base import Policy, PolicyView
from doll.ps.policies.essp import Essp, EsspPolicyConfig
from doll.ps.policies.ssp import Ssp
from doll.ps.policies.vap import Vap


def failed(checks: Sequence[Check]) -> list[str]:
    return [check.what for check in checks if not check.is_expected]


class Lazy(Essp):
    """Sends new weights at every sixth move of the slowest only."""

    def recipients(self, view: PolicyView) -> Collection[int]:
        is_needed = self._clocks.minimum % 6 == 0
        return super().recipients(view) if is_needed else ()


class OneTooLoose(Ssp):
    """A worker may be s + 1 ahead."""

    def needed(self, batch: int, offset: int) -> int:
        return super().needed(batch, offset) - 1


class TooOld(Ssp):
    """The gate is right, but weights may be one clock too old."""

    def min_version(self, view: PolicyView, worker: int) -> int:
        needed = self._needed_by(view, worker)
        return self._clocks.version_of(needed - 1)


class ConstantBound(Vap):
    def bound(self, version: int) -> float:
        return self.value_bound


@pytest.fixture(scope="module")
def reads() -> dict[tuple[str, int], essp_fig1.Reads]:
    return {
        (name, staleness): essp_fig1.simulate(name, staleness, range(1))
        for name in ("ssp", "essp")
        for staleness in essp_fig1.STALENESS
    }


@pytest.mark.slow  # simulations
def test_the_policies_meet_the_criteria_of_the_staleness_figure(reads: dict[tuple[str, int], essp_fig1.Reads]) -> None:
    assert failed(essp_fig1.checks_of(reads)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mutant", "expected"),
    [
        ("essp", Lazy, "left: mean staleness of ESSP(7)"),
        ("ssp", OneTooLoose, "left: bounds s at which a read of SSP is outside"),
        ("ssp", TooOld, "left: bounds s at which a read of SSP is outside"),
    ],
)
def test_a_wrong_policy_fails_the_staleness_figure(
    reads: dict[tuple[str, int], essp_fig1.Reads], name: str, mutant: type[Policy], expected: str
) -> None:
    wrong = essp_fig1.simulate(name, 7, range(1), policy=mutant)
    assert any(what.startswith(expected) for what in failed(essp_fig1.checks_of({**reads, (name, 7): wrong})))


@pytest.mark.slow
def test_ssp_in_place_of_essp_fails_both_halves(reads: dict[tuple[str, int], essp_fig1.Reads]) -> None:
    of_ssp = {("essp", staleness): reads["ssp", staleness] for staleness in essp_fig1.STALENESS}
    wrong = failed(essp_fig1.checks_of({**reads, **of_ssp}))
    assert {"left: mean staleness of ESSP(15)", "right: blocked share of ESSP(3)"} <= set(wrong)


@pytest.mark.slow
def test_essp_that_sends_weights_seldom_diverges_as_ssp_does() -> None:
    rate = essp_fig2.RATES[1]
    losses = {
        (name, at, staleness): [essp_fig2.simulate(name, at, staleness, 0).loss]
        for name in ("ssp", "essp")
        for at in essp_fig2.RATES[:2]
        for staleness in (0, 31)
    }
    assert failed(essp_fig2.checks_of(losses)) == []

    class Never(Essp):
        """Sends new weights only when they have to be as new."""

        def recipients(self, view: PolicyView) -> Collection[int]:
            return super().recipients(view) if self._clocks.minimum % (self.staleness + 1) == 0 else ()

    losses["essp", rate, 31] = [essp_fig2.simulate("essp", rate, 31, 0, policy=Never).loss]
    assert failed(essp_fig2.checks_of(losses)) == [f"step {rate}: runs of ESSP that diverge, of 2"]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [vap_bound.PerWorkerVap, ConstantBound])
def test_a_wrong_bound_on_values_is_seen(mutant: type[Vap]) -> None:
    for adversary, slow in vap_bound.SETTINGS:
        views = vap_bound.simulate(Vap, 2.0, adversary=adversary, slow=slow, seeds=range(1), clocks=40)
        assert views.beyond == 0
        assert views.shares.max() > 0.9
    assert vap_bound.simulate(mutant, 5.0, adversary=True, seeds=range(1)).beyond > 0


@pytest.mark.slow
@pytest.mark.parametrize("slow", [1.0, vap_bound.SLOW])
def test_a_smaller_bound_on_values_blocks_workers_longer(slow: float) -> None:
    blocked = [
        vap_bound.simulate(Vap, bound, adversary=True, slow=slow, seeds=range(1), clocks=40).blocked_share
        for bound in (0.5, 2.0, 5.0, math.inf)
    ]
    assert blocked == sorted(blocked, reverse=True)
    assert blocked[0] > 0.8
    assert blocked[-1] < 0.2


class Hasty(Vap):
    """Applies each step as it comes, whatever an older view then misses: that view is void, so the bound holds."""

    def _misses(self, number: int, behind: int | None = None) -> float:
        return 0.0 if behind is not None else super()._misses(number)


@pytest.mark.slow
def test_steps_wait_rather_than_make_the_view_of_a_slow_worker_void() -> None:
    ours, hasty = (
        vap_bound.simulate(policy, 5.0, adversary=False, slow=vap_bound.SLOW, seeds=range(1)) for policy in (Vap, Hasty)
    )
    assert ours.beyond == hasty.beyond == 0
    assert ours.voided < 0.04
    assert hasty.voided > 1.5 * ours.voided


def test_the_policies_of_the_simulation_are_the_live_ones_but_for_the_grants_under_way() -> None:
    for staleness in (0, 3):
        policy = NetworkedSystem(
            EsspPolicyConfig(staleness=staleness), workers=2, clocks=1, compute=lambda worker, batch: 1.0,
            latency_s=0.0, read="waits", seed=0,
        ).engine.policy  # fmt: skip
        assert isinstance(policy, Essp)
        assert policy.max_under_way() == staleness + 1
