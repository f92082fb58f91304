"""diloco: who is in an outer step, when it is made, and what it makes of the changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from doll.config.policy import POLICIES, SparsePush, policy_section
from doll.ps.policies import make_policy
from doll.ps.policies.diloco import Diloco, DilocoPolicyConfig
from doll.theory.checks import Floats
from policy_view import PolicyWorld

H = 4


class View(PolicyWorld):
    """Workers that deliver whole rounds."""

    def delivered(self, *numbers: int) -> None:
        for number in numbers:
            self.put(number, computing=0, held=H)

    def collected(self) -> set[int]:
        return {batch.partition for batch in self.policy.collect(self)}


def view_of(count: int = 4, quorum: float = 0.75, grace_s: float = 2.0) -> View:
    view = View(Diloco(H, quorum=quorum, grace_s=grace_s), count)
    for number in range(count):
        view.put(number, computing=H)
    return view


def test_a_worker_is_granted_a_whole_round_or_nothing() -> None:
    view = View(Diloco(H), 3)
    view.put(0, waiting=H - 1)
    view.put(1, waiting=H + 2)
    view.put(2, waiting=2, applied=H + 2)  # its push was cut short when it left: it ends where the others' end
    assert view.policy.start(view) == [1] * H + [2] * 2
    assert list(view.policy.start(view)) == []
    view.put(1, computing=H, waiting=2)
    assert list(view.policy.start(view)) == [], "one round at a time"
    view.put(1, computing=2, waiting=4)
    assert view.policy.start(view) == [1] * 2, "what was taken back is granted again"


def test_while_a_checkpoint_waits_for_rests_open_pushes_are_completed_and_none_begins() -> None:
    view = View(Diloco(H, is_sparse=True), 3)
    view.is_settling = True
    view.put(0, waiting=H)
    view.put(1, computing=2, waiting=H)
    assert view.policy.start(view) == [1] * 2
    view.put(1, computing=H, waiting=2)
    view.delivered(1)
    assert view.collected() == {1}, "nobody computes, so the round is over without the worker that may not begin"
    view.put(1, held=0, applied=H)
    assert list(view.policy.start(view)) == []
    view.is_settling = False
    assert view.policy.start(view) == [0] * H


@pytest.mark.parametrize("name", POLICIES.built_in)
@pytest.mark.parametrize("more", [{}, {"density": 0.02}])
def test_the_job_file_and_the_engine_agree_on_what_is_held_back(name: str, more: dict[str, float]) -> None:
    section: Any = policy_section(name)
    config = section(name=name, **(more if name == "diloco" else {}))
    assert config.holds_back == make_policy(config).holds_back == (name == "isp" or (name == "diloco" and bool(more)))


def test_only_sparse_rounds_hold_back_and_have_no_outer_momentum() -> None:
    assert not Diloco(H).holds_back
    assert Diloco(H).takes_late_pushes
    sparse = make_policy(DilocoPolicyConfig(density=0.02))
    assert sparse.holds_back
    assert not sparse.takes_late_pushes
    assert DilocoPolicyConfig().outer_step == (0.7, 0.5, 0.5)
    assert DilocoPolicyConfig().sparse_push is None
    assert DilocoPolicyConfig(density=0.02).outer_step is None
    assert DilocoPolicyConfig(density=0.02).sparse_push == (0.02, 2, 1.0)
    assert SparsePush(0.02, 2, 0.5).factor(4) == 0.125
    with pytest.raises(ValueError, match="outer_momentum: expected 0 with density below 1"):
        DilocoPolicyConfig(density=0.02, outer_momentum=0.9)


def test_a_round_of_all_ends_at_once_and_one_of_a_quorum_after_its_grace() -> None:
    view = view_of()
    view.delivered(0, 1, 2, 3)
    assert view.collected() == {0, 1, 2, 3}
    view = view_of()
    view.delivered(0, 1)
    view.now_s = 100.0
    assert view.collected() == set(), "two of four are no quorum"
    view.delivered(2)
    assert view.collected() == set()
    view.now_s = 101.9
    assert view.collected() == set()
    view.now_s = 102.0
    assert view.collected() == {0, 1, 2}, "the fourth is in the next round"


def test_a_dead_worker_is_not_waited_for_and_dry_streams_are_for_the_grace_only() -> None:
    view = view_of()
    view.delivered(0, 1, 2)
    view.put(3, computing=0, is_live=False)
    assert view.collected() == {0, 1, 2}
    view = view_of()
    view.delivered(0)
    for number in (1, 2, 3):
        view.put(number, computing=0)  # nothing to read
    assert view.collected() == set()
    view.now_s = 2.0
    assert view.collected() == {0}


def test_a_quorum_that_is_lost_begins_its_grace_again() -> None:
    view = view_of()
    view.delivered(0, 1, 2)
    assert view.collected() == set()
    view.now_s = 1.5
    view.put(2, held=0, computing=H)  # its blob is lost: it computes again
    assert view.collected() == set()
    view.now_s = 3.0
    view.delivered(2)
    assert view.collected() == set()
    view.now_s = 5.0
    assert view.collected() == {0, 1, 2}


def round_of(view: View, took_s: float, *numbers: int) -> set[int]:
    """The next round: these are granted H batches and deliver after `took_s`. Who is in its outer step."""
    for number in numbers:
        view.put(number, held=0, computing=0, applied=view.worker(number).applied + view.worker(number).held, waiting=H)
    assert view.policy.start(view) == [number for number in sorted(numbers) for _ in range(H)]
    for number in numbers:
        view.put(number, computing=H, waiting=0)
    view.now_s += took_s
    view.delivered(*numbers)
    return view.collected()


def test_the_grace_is_no_longer_than_the_round_took_and_who_missed_one_is_not_waited_for() -> None:
    view = View(Diloco(H, quorum=0.75, grace_s=2.0), 4)
    assert round_of(view, 0.1, 0, 1, 2, 3) == {0, 1, 2, 3}
    view.put(3, held=0, waiting=H, applied=H)
    view.policy.start(view)
    view.put(3, computing=H, waiting=0)  # and stands still
    assert round_of(view, 0.1, 0, 1, 2) == set()
    view.now_s += 0.09
    assert view.collected() == set()
    view.now_s += 0.02
    assert view.collected() == {0, 1, 2}, "after as long as the quorum took, not after 2 s"
    assert round_of(view, 0.1, 0, 1, 2) == {0, 1, 2}, "it missed a round: nobody waits"
    view.put(3, computing=0, held=H)
    assert round_of(view, 0.1, 0, 1, 2) == {0, 1, 2, 3}, "in the round in which it comes"
    assert round_of(view, 0.1, 0, 1, 2, 3) == {0, 1, 2, 3}
    view.put(3, held=0, waiting=H, applied=3 * H)
    view.policy.start(view)
    view.put(3, computing=H, waiting=0)
    assert round_of(view, 5.0, 0, 1, 2) == set(), "it is waited for again"
    view.now_s += 2.0
    assert view.collected() == {0, 1, 2}, "never longer than grace_s"


def test_a_worker_that_no_records_reach_delays_one_round_only() -> None:
    view = view_of()
    view.put(3, computing=0)
    view.delivered(0, 1, 2)
    assert view.collected() == set()
    view.now_s = 2.0
    assert view.collected() == {0, 1, 2}, "after the grace"
    for number in (0, 1, 2):
        view.put(number, held=0, computing=H, applied=H)
    view.delivered(0, 1, 2)
    assert view.collected() == {0, 1, 2}, "at once"
    for number in (0, 1, 2):
        view.put(number, held=0, computing=H, applied=2 * H)
    view.put(3, computing=H)  # its records have come
    view.delivered(0, 1, 2)
    assert view.collected() == set(), "it is waited for as the others"
    view.delivered(3)
    assert view.collected() == {0, 1, 2, 3}


def test_late_workers_are_no_quorum() -> None:
    view = view_of()
    view.delivered(0, 1, 2)
    assert view.collected() == set()
    view.now_s = 2.0
    assert view.collected() == {0, 1, 2}
    for number in (0, 1, 2):
        view.put(number, held=0, computing=H)
    view.delivered(0, 1)
    view.now_s = 100.0
    assert view.collected() == set(), "two of four live workers"
    view.put(3, computing=0, is_live=False)
    view.put(2, computing=0, is_live=False)
    assert view.collected() == {0, 1}


@pytest.mark.parametrize("values", [{"local_batches": 0}, {"quorum": 0.0}, {"quorum": 1.1}, {"grace_s": -1.0}])
def test_numbers_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        DilocoPolicyConfig(**values)


def test_what_a_plan_predicts() -> None:
    policy = DilocoPolicyConfig(local_batches=8, quorum=0.75)
    assert policy.batches_per_update(4) == 32
    assert policy.update_rate_per_s([100.0, 10.0, 80.0, 90.0], batch_size=10) == 1.0, "the third fastest"


@pytest.mark.slow  # loads torch
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_outer_step_is_torchs_nesterov_on_the_mean_change(momentum: float) -> None:
    import torch
    from doll.config.policy import OuterStep
    from doll.model.flat_model import FlatModel
    from doll.optim.optimizer import OuterOptimizer

    def made() -> FlatModel:
        module = torch.nn.Module()
        module.w = torch.nn.Parameter(torch.arange(5.0))
        return FlatModel(module)

    rng = np.random.default_rng(1)
    ours = OuterOptimizer(made(), OuterStep(0.7, momentum, 0.5))
    weights = torch.nn.Parameter(torch.arange(5.0))
    theirs = torch.optim.SGD([weights], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    for step in range(6):
        if step == 3:  # a restart
            tensors, ours = ours.tensors(), OuterOptimizer(made(), OuterStep(0.7, momentum, 0.5))
            ours.load(tensors)
        changes: list[tuple[int, int, Floats]] = [(n, age, rng.normal(size=5)) for n, age in ((8, 0), (24, 2), (16, 1))]
        ours.apply([(ours.weight(n, age) * change).astype(np.float32) for n, age, change in changes], 1 / 48, 48)
        mean = sum(n * 0.5**age * change for n, age, change in changes) / 48
        weights.grad = torch.tensor(-mean, dtype=torch.float32)
        theirs.step()
        np.testing.assert_allclose(ours.weights, weights.detach().numpy(), rtol=1e-5, atol=1e-6)
