"""A worker that steps itself: what its view holds, and what it pushes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from doll.config import TrainingConfig
from doll.consumers.compute.error_feedback import rounded_before
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.compute.step_model import StepModel
from doll.errors import IllegalEventError, ServiceUnavailableError
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import DivergedError, Optimizer
from doll.records.control import Grant, NewVersion
from doll.storage.blobs import encode_blob
from doll.storage.contributions import Compressor
from doll.task.base import Task
from manual_executor import ManualExecutor
from memory_stores import MemoryBlobs
from worker_records import grant

pytestmark = pytest.mark.slow  # loads torch

LR = 0.5


class Regression(Task):
    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2).mean()

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
        return {}


class Rig:
    def __init__(self, *, norm: bool = False, lr: float = LR, rounds: bool = False, **training: Any) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 3), *([torch.nn.BatchNorm1d(3)] if norm else [])]
        self.model = FlatModel(torch.nn.Sequential(*layers))
        self.blobs = MemoryBlobs()
        self.computer = GradientComputer(Regression(), self.model)
        self.training = TrainingConfig.model_validate({"optimizer": {"name": "sgd", "lr": lr}, **training})
        self.steps = StepModel("unit", self.blobs, self.training, self.model, self.computer, rounds=rounds)

    @property
    def view(self) -> np.ndarray[Any, Any]:
        return self.computer.weights[: self.model.num_parameters].copy()

    def publish(self, version: int, **changes: Any) -> Grant:
        """A grant of `version`, whose weights are all equal to it."""
        key = f"doll:unit:w:{changes.get('term', 3)}:{version}"
        weights = np.full(self.computer.weights.size, version, np.float32)
        self.blobs.put(key, encode_blob(weights, job="unit", kind="w", version=version), 60.0)
        return grant(
            changes.pop("first", 5), version, version=version, min_version=changes.pop("min_version", version), key=key,
            **changes,
        )  # fmt: skip

    def learn(self, batch: int, n: int = 8) -> None:
        """One step of a batch whose content depends on its number only."""
        rng = np.random.default_rng(batch)
        x, y = rng.normal(size=(n, 4)).astype(np.float32), rng.normal(size=(n, 3)).astype(np.float32)
        gradient = self.computer.compute(x, y)
        assert self.steps.add(gradient, batch=batch)

    def load(self, order: Grant) -> int | None:
        """As `GrantHandler`."""
        return self.steps.load(order) if self.steps.begin(order) else None


def pushed(rig: Rig) -> np.ndarray[Any, Any]:
    values = rig.steps.values()
    assert values is not None
    return values[: rig.model.num_parameters].copy()


def test_a_step_is_the_optimizers_and_the_view_holds_it_at_once() -> None:
    rig, other = Rig(), Rig()
    rig.load(rig.publish(1))
    before = rig.view
    rig.learn(5)
    other.computer.weights[:] = 1
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32)
    Optimizer(other.model, other.training.optimizer).apply([other.computer.compute(x, y).values], 1 / 8, 8)
    assert np.array_equal(rig.view, other.view)
    assert np.array_equal(pushed(rig), rig.view - before)


@pytest.mark.parametrize(("contributions", "share"), [("mean", np.float32(1 / 4)), ("sum", np.float32(1))])
def test_the_model_receives_a_share_of_a_step_and_the_view_has_the_whole_step(
    contributions: str, share: np.float32
) -> None:
    rig, alone = (Rig(policy={"name": "ssp", "contributions": contributions}) for _ in range(2))
    for one, num_live in ((rig, 4), (alone, 1)):
        one.load(one.publish(1, num_live=num_live))
        one.learn(5)
    step = pushed(alone)
    assert np.array_equal(rig.view, alone.view)
    assert np.array_equal(pushed(rig), share * step)
    assert rig.load(rig.publish(2, first=6, included=5, num_live=4)) == 2
    assert np.array_equal(rig.view, np.float32(2) + step), "the others' steps of this size are not in version 2, either"
    assert rig.load(rig.publish(3, first=6, included=6, num_live=4)) == 3
    assert (rig.view == 3).all(), "version 3 has the share, and the others' shares"


def test_each_step_of_a_wave_has_the_share_of_its_own_grant() -> None:
    rig = Rig(policy={"name": "wsp", "wave_batches": 2})
    for batch, num_live in ((5, 2), (6, 4)):
        rig.load(rig.publish(1, first=batch, num_live=num_live))
        before = rig.view
        rig.learn(batch)
        if batch == 5:
            first = rig.view - before
        else:
            second = rig.view - before
    assert np.array_equal(pushed(rig), first * np.float32(0.5) + second * np.float32(0.25))


def test_a_class_steps_on_the_view_with_the_rates_of_the_version_below_it() -> None:
    recipe: dict[str, Any] = {
        "policy": {"name": "ssp", "staleness": 1},
        "optimizer": {"class": "torch.optim.AdamW", "args": {"lr": 0.5}, "groups": {"bias": {"weight_decay": 0}}},
        "schedule": {"class": "torch.optim.lr_scheduler.StepLR", "args": {"step_size": 1, "gamma": 0.5}},
        "clip_norm": 0.1,
    }
    rig, other = Rig(**recipe), Rig()
    weight, bias = other.model.module.parameters()
    groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [bias], "weight_decay": 0}]
    plain = torch.optim.AdamW(groups, lr=0.5)
    for batch, version in enumerate((1, 1, 4, 2), start=5):
        rig.load(rig.publish(version, first=batch, included=batch))
        before = rig.view
        other.computer.weights[:] = rig.computer.weights
        rig.learn(batch)
        rng = np.random.default_rng(batch)
        x, y = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32)
        other.computer.compute(x, y)
        other.model.grad /= 8
        torch.nn.utils.clip_grad_norm_([weight, bias], 0.1)
        for group in plain.param_groups:
            group["lr"] = 0.5 * 0.5**version
        plain.step()
        assert np.array_equal(rig.view, other.view), batch
        assert np.array_equal(pushed(rig), rig.view - before)


@pytest.mark.parametrize("included", [5, 6])
def test_newer_weights_get_the_own_steps_that_they_do_not_hold(included: int) -> None:
    rig = Rig()
    rig.load(rig.publish(1))
    rig.learn(5)
    step = pushed(rig)
    assert rig.load(rig.publish(2, first=6, included=included)) == 2
    expected = np.full_like(step, 2) + (step if included == 5 else 0)
    assert np.array_equal(rig.view, expected)


def test_weights_that_are_kept_keep_the_own_steps_on_top() -> None:
    rig = Rig()
    rig.load(rig.publish(1))
    rig.learn(5)
    pushed(rig)
    view = rig.view
    rig.blobs.wipe()
    newer = grant(6, 9, version=9, min_version=1, key="gone", included=6)
    assert rig.load(newer) == 1
    assert np.array_equal(rig.view, view)


def test_a_batch_that_is_granted_again_is_computed_without_its_own_lost_step() -> None:
    rig = Rig()
    rig.load(rig.publish(1))
    rig.learn(5)
    pushed(rig)
    rig.learn(6)
    pushed(rig)
    values = rig.steps._pushed[0].values
    assert values is not None
    five = values[: rig.model.num_parameters]
    assert rig.load(rig.publish(1, first=6, included=5)) == 1
    assert np.array_equal(rig.view, np.ones_like(five) + five)


def test_a_new_server_has_none_of_the_steps() -> None:
    rig = Rig()
    rig.load(rig.publish(7))
    rig.learn(5)
    pushed(rig)
    rig.learn(6)
    assert rig.load(rig.publish(4, term=4, first=5, included=5)) == 4
    assert (rig.view == 4).all()
    assert rig.steps.values() is None


def test_a_wave_is_the_sum_of_its_steps_and_is_pushed_once() -> None:
    rig = Rig()
    rig.load(rig.publish(1))
    before = rig.view
    for batch in (5, 6, 7):
        rig.learn(batch)
    assert np.allclose(pushed(rig), rig.view - before, atol=1e-5)
    assert rig.steps.values() is None
    rig.learn(8)
    assert len(rig.steps._pushed) == 3
    assert np.abs(pushed(rig)).max() > 0


def test_weights_that_are_offered_are_used_and_older_ones_never_come_back() -> None:
    rig = Rig()
    rig.load(rig.publish(1))
    rig.learn(5)
    pushed(rig)
    offered = rig.publish(8)
    rig.steps.offer(NewVersion(term=3, worker=1, version=8, key=offered.key, included=6))
    rig.steps.offer(NewVersion(term=3, worker=1, version=7, key="late", included=5))
    assert rig.load(grant(6, 2, version=6, min_version=0, key="doll:unit:w:3:6", included=6)) == 8
    assert (rig.view == 8).all()
    assert rig.load(grant(7, 3, version=8, min_version=0, key=offered.key, included=6)) == 8


def test_weights_that_are_offered_and_gone_do_not_stop_the_worker() -> None:
    rig = Rig()
    rig.load(rig.publish(1))
    rig.steps.offer(NewVersion(term=3, worker=1, version=8, key="gone"))
    assert rig.load(grant(5, 2, version=2, min_version=1, key="gone too")) == 1
    assert rig.load(grant(5, 3, version=9, min_version=9, key="gone too")) is None


def test_buffers_are_pushed_as_sums_and_the_own_ones_go_on() -> None:
    rig = Rig(norm=True)
    rig.load(rig.publish(1))
    floats = slice(rig.model.num_parameters, rig.model.num_floats)
    before = rig.computer.weights[floats].copy()
    rig.learn(5)
    own = rig.computer.weights[floats].copy()
    assert not np.array_equal(own, before)
    values = rig.steps.values()
    assert values is not None
    assert np.allclose(values[floats], 8 * own)


def test_the_sum_is_a_step_that_is_as_many_times_longer() -> None:
    steps = []
    for reduction in ("mean", "sum"):
        rig = Rig(reduction=reduction, lr=2.0**-6)
        rig.load(rig.publish(1))
        rig.learn(5)
        steps.append(pushed(rig))
    assert np.allclose(steps[1], 8 * steps[0], rtol=1e-3, atol=1e-6)


def test_a_view_that_is_not_finite_ends_the_worker() -> None:
    rig = Rig(lr=1e30)
    rig.load(rig.publish(1))

    def learn() -> None:
        for batch in range(5, 30):
            rig.learn(batch)

    with pytest.raises(DivergedError, match="not finite"):
        learn()


def test_a_push_names_what_it_holds() -> None:
    rig = Rig()
    order = rig.publish(1)
    for batch in (5, 6, 7):
        rig.load(msgspec.structs.replace(order, first=batch, grant_ids=(100 + batch,)))
        rig.steps.skip(6) if batch == 6 else rig.learn(batch)
    pushed(rig)
    assert rig.steps.holds == ((5, 105), (6, 106), (7, 107))
    rig.load(msgspec.structs.replace(order, first=8, grant_ids=(108,)))
    rig.steps.skip(8)
    assert rig.steps.values() is None
    assert rig.steps.holds == ((8, 108),), "without a step, and the server waits for it"
    assert rig.steps.rest(0) is None
    assert rig.steps.holds == ()


@pytest.mark.parametrize("again", [5, 6])
def test_a_step_that_was_made_is_not_made_again(again: int) -> None:
    rig = Rig()
    rig.load(rig.publish(1))
    rig.learn(5)
    pushed(rig)
    rig.learn(6)
    with pytest.raises(IllegalEventError, match="expected a batch after 6"):
        rig.learn(again)


def test_a_batch_that_is_in_the_model_is_not_computed_whatever_grant_names_it() -> None:
    rig = Rig()
    rig.load(rig.publish(1))
    for batch in (5, 6, 7):
        rig.learn(batch)
        pushed(rig)
    rig.load(rig.publish(2, first=8, included=7))
    assert not rig.steps.begin(rig.publish(1, first=6)), "a late copy of the grant of batch 6"
    assert [step.batch for step in rig.steps._pushed] == [7]
    step = rig.steps._pushed[0].values
    assert step is not None
    assert np.array_equal(rig.view, 2 + step[: rig.model.num_parameters])


def test_what_is_held_back_stays_until_its_rest_is_stored() -> None:
    """The blob store may be away: the server asks again, and the rest must be the same."""
    rig = Rig(policy={"name": "isp", "significance": 1000.0})
    rig.load(rig.publish(1))
    before = rig.view
    rig.learn(5)
    sent = pushed(rig)
    assert rig.steps.holds_back
    first, second = rig.steps.rest(6), rig.steps.rest(6)
    assert first is not None
    assert second is not None
    assert np.array_equal(first, second)
    assert np.allclose(sent + first[: rig.model.num_parameters], rig.view - before, atol=1e-6)
    rig.steps.rest_stored()
    assert rig.steps.rest(6) is None
    assert not rig.steps.holds_back


@pytest.mark.parametrize("significance", [0.0, 0.7])
def test_what_rounding_takes_is_held_back_for_every_significance(significance: float) -> None:
    rig = Rig(policy={"name": "isp", "significance": significance}, rounds=True)
    plain = Rig(policy={"name": "isp", "significance": significance})
    for own in (rig, plain):
        own.load(own.publish(1))
        own.learn(5)
    step = rig.view - 1
    sent, whole = pushed(rig), pushed(plain)
    compressor = Compressor("unit", rig.model.num_parameters, rounding=rounded_before)
    assert not (sent.view(np.uint32) & 0xFFFF).any()
    assert compressor.rounding is not None
    assert compressor.rounding(sent) is not None
    assert (whole.view(np.uint32) & 0xFFFF).any()
    assert plain.steps.holds_back == (significance > 0)
    rest = rig.steps.rest(6)
    assert rest is not None
    assert compressor.rounding(rest) is None, "a rest is sent whole, so that a checkpoint has everything"
    np.testing.assert_allclose(sent + rest[: rig.model.num_parameters], step, atol=1e-6)


@pytest.mark.parametrize(("batch", "version"), [(0, 99), (99, 99), (99, 0)])
def test_the_filter_falls_with_the_round_and_not_with_the_workers_own_batches(batch: int, version: int) -> None:
    """A worker that joins late counts from its first batch, and its filter is that of the others."""
    rig = Rig(policy={"name": "isp", "significance": 0.5})
    granted = rig.publish(version, first=batch)
    assert rig.steps.begin(granted)
    rig.load(granted)
    before = rig.view
    rig.learn(batch)
    step, sent = rig.view - before, pushed(rig)
    is_significant = np.abs(step) > 0.5 / np.sqrt(version + 1) * np.abs(rig.view)
    assert np.array_equal(sent != 0, is_significant)
    assert is_significant.any()


def offered() -> tuple[Rig, ManualExecutor]:
    """A worker at version 1 that was offered version 2, and what reads it beside the computation."""
    rig, background = Rig(), ManualExecutor()
    rig.steps = StepModel("unit", rig.blobs, rig.training, rig.model, rig.computer, background=background)
    rig.load(rig.publish(1))
    order = rig.publish(2)
    rig.steps.offer(NewVersion(term=3, worker=1, version=2, key=order.key))
    return rig, background


def test_weights_that_were_offered_are_read_while_the_worker_computes_and_never_change_a_batch() -> None:
    rig, background = offered()
    before = rig.view
    background.run()
    assert (rig.view == before).all(), "a batch that is computed keeps its weights"
    rig.learn(5)
    pushed(rig)
    rig.blobs.wipe()  # the next batch does not read the store
    assert rig.load(rig.publish(1, first=6, min_version=0)) == 2
    rig.blobs.wipe()
    step = rig.view - 2
    other = Rig()
    other.load(other.publish(1))
    other.learn(5)
    assert np.allclose(step, pushed(other), atol=1e-6), "its own step is on top: these weights do not hold it"


def test_an_offer_that_was_not_read_ahead_is_read_with_the_next_batch() -> None:
    rig, background = offered()
    assert rig.load(rig.publish(1, first=6, min_version=0)) == 2
    rig.blobs.fail_next(ServiceUnavailableError("down"))
    background.run()
    assert (rig.view == 2).all()
