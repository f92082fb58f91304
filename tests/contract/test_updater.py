"""The contract of `Updater`, for every adapter: what an engine's update makes of a model, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from doll.config import AdagradConfig, AdamConfig, SgdConfig, TrainingConfig
from doll.errors import CheckpointError
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import Contribution, DivergedError, Optimizer, StepAdder, Updater
from doll.optim.recipe import make_optimizer
from doll.ps.engine.events import ApplyUpdate
from doll.ps.model.updater import ContributionBuffer
from pushes import applied_set, push_of

pytestmark = pytest.mark.slow  # loads torch

A_CLASS = TrainingConfig.model_validate(
    {
        "optimizer": {"class": "torch.optim.AdamW", "args": {"lr": 0.01}, "groups": {"bias": {"weight_decay": 0}}},
        "schedule": {"class": "torch.optim.lr_scheduler.StepLR", "args": {"step_size": 1}},
        "clip_norm": 1.0,
        "ema": {"decay": 0.9},
    }
)
ADAPTERS: dict[str, Callable[[FlatModel], Updater]] = {
    "sgd": lambda model: Optimizer(model, SgdConfig(lr=0.1)),
    "momentum, clipped": lambda model: Optimizer(model, SgdConfig(lr=0.1, momentum=0.9), clip_norm=1.0),
    "adam": lambda model: Optimizer(model, AdamConfig(name="adam", lr=0.01)),
    "adagrad": lambda model: Optimizer(model, AdagradConfig(lr=0.1, initial_accumulator=0.1)),
    "adagrad with momentum": lambda model: Optimizer(model, AdagradConfig(lr=0.1, momentum=0.7)),
    "a class with a schedule, clipped, averaged": lambda model: make_optimizer(A_CLASS, model),
    "added steps": StepAdder,
    "added steps, averaged": lambda model: StepAdder(model, ema=0.9),
}


@pytest.fixture(params=ADAPTERS)
def make(request: pytest.FixtureRequest) -> Callable[[], Updater]:
    """A fresh updater, always on the same weights."""

    def fresh() -> Updater:
        torch.manual_seed(7)
        return ADAPTERS[request.param](FlatModel(torch.nn.Linear(4, 3)))

    return fresh


def contributions(count: int, seed: int = 0) -> list[Contribution]:
    return list(np.random.default_rng(seed).normal(size=(count, 15)).astype(np.float32))


def test_equal_arguments_make_equal_models(make: Callable[[], Updater]) -> None:
    one, other = make(), make()
    for seed in range(5):
        one.apply(contributions(3, seed), 1 / 12, 12)
        other.apply(contributions(3, seed), 1 / 12, 12)
    assert one.weights.tobytes() == other.weights.tobytes()
    assert one.weights.tobytes() != make().weights.tobytes()


def test_contributions_are_only_read(make: Callable[[], Updater]) -> None:
    given = contributions(2)
    before = [item.copy() for item in given]
    for item in given:
        item.flags.writeable = False  # as a blob's are
    make().apply(given, 0.5, 2)
    assert all((now == then).all() for now, then in zip(given, before, strict=True))


@pytest.mark.parametrize("added", range(5))
def test_what_is_added_before_counts_as_if_it_came_with_the_update(make: Callable[[], Updater], added: int) -> None:
    one, other = make(), make()
    for seed in range(3):
        given = contributions(4, seed)
        one.apply(given, 1 / 12, 12)
        for item in given[:added]:
            reused = item.copy()
            other.add(reused)
            reused[:] = np.nan
        other.apply(given[added:], 1 / 12, 12)
        assert one.weights.tobytes() == other.weights.tobytes()


def test_new_weights_are_written_into_the_memory_that_is_given(make: Callable[[], Updater]) -> None:
    """As a server does that publishes versions from shared memory; it may run out of it for a while."""
    plain, updater = make(), make()
    given = [np.empty_like(plain.weights) for _ in range(4)]
    into = [given[0], given[1], None, None, given[2], given[2], given[3]]
    written: dict[int, bytes] = {}
    for seed, memory in enumerate(into):
        plain.apply(contributions(2, seed), 1 / 24, 24)
        updater.apply(contributions(2, seed), 1 / 24, 24, memory)
        assert updater.weights.tobytes() == plain.weights.tobytes()
        assert (updater.weights is memory or np.shares_memory(updater.weights, memory)) == (memory is not None)
        if memory is not None:
            written[id(memory)] = memory.tobytes()
        for earlier in given:
            assert id(earlier) not in written or earlier.tobytes() == written[id(earlier)], "others may read it"
    assert {name: array.tobytes() for name, array in updater.tensors().items()} == {
        name: array.tobytes() for name, array in plain.tensors().items()
    }
    tensors = {name: array.copy() for name, array in updater.tensors().items()}
    updater.load(tensors)
    assert not any(np.shares_memory(updater.weights, memory) for memory in given)


def test_without_contributions_the_weights_stay(make: Callable[[], Updater]) -> None:
    updater = make()
    before = updater.weights.tobytes()
    updater.apply([], 1.0, 0)
    assert updater.weights.tobytes() == before


def test_weights_are_the_live_array_and_tensors_are_copies(make: Callable[[], Updater]) -> None:
    updater = make()
    weights, tensors = updater.weights, updater.tensors()
    before = weights.copy()
    updater.apply(contributions(1), 1.0, 1)
    assert weights.tobytes() == updater.weights.tobytes() != before.tobytes()
    assert tensors["weights"].tobytes() == before.tobytes()


def test_a_successor_goes_on_from_the_tensors(make: Callable[[], Updater]) -> None:
    first = make()
    first.apply(contributions(2, 1), 0.25, 4)
    successor = make()
    successor.load(first.tensors())
    for updater in (first, successor):
        updater.apply(contributions(2, 2), 0.25, 4)
    assert successor.weights.tobytes() == first.weights.tobytes()
    assert {name: array.tobytes() for name, array in successor.tensors().items()} == {
        name: array.tobytes() for name, array in first.tensors().items()
    }


@pytest.mark.parametrize("tensors", [{}, {"weights": np.zeros(3, np.float32)}])
def test_tensors_of_another_model_are_refused(
    make: Callable[[], Updater], tensors: Mapping[str, npt.NDArray[Any]]
) -> None:
    with pytest.raises(CheckpointError):
        make().load(tensors)


def test_a_number_that_is_not_finite_is_an_error(make: Callable[[], Updater]) -> None:
    bad = contributions(1)
    bad[0][2] = np.nan
    with pytest.raises(DivergedError):
        make().apply(bad, 1.0, 1)


# --- the apply step -------------------------------------------------------------------------------------------------


def update(*pushes: tuple[int, str, int], scale: float = 0.125) -> ApplyUpdate:
    """An update of these (grant, key, samples)."""
    sets = tuple(
        applied_set(
            push_of(worker=0, session=1, batch=number, term=1, grant_id=number, version=0, key=key, n_samples=samples)
        )
        for number, key, samples in pushes
    )
    return ApplyUpdate(1, sets, scale, 0, 0)


def test_the_apply_step_takes_contributions_in_the_updates_order(make: Callable[[], Updater]) -> None:
    a, b, c = contributions(3)
    by_hand, updater = make(), make()
    buffer = ContributionBuffer(updater)
    for number, item in ((3, c), (1, a), (2, b)):
        buffer.put(number, item)
    assert buffer.apply(update((2, "k2", 4), (4, "", 0), (1, "k1", 3))) == 7
    by_hand.apply([b, a], 0.125, 7)
    assert updater.weights.tobytes() == by_hand.weights.tobytes()
    assert len(buffer) == 1


def test_a_contribution_that_never_came_is_an_error(make: Callable[[], Updater]) -> None:
    updater = make()
    before = updater.weights.tobytes()
    buffer = ContributionBuffer(updater)
    with pytest.raises(KeyError, match="expected the gradient of grant 1"):
        buffer.apply(update((1, "k1", 4)))
    assert updater.weights.tobytes() == before


@pytest.mark.parametrize("seed", range(20))
def test_contributions_that_are_added_as_they_come_make_the_same_model(make: Callable[[], Updater], seed: int) -> None:
    """Grants are answered in any order; some batches have nothing to add, and some answers have to come twice."""
    rng = np.random.default_rng(seed)
    at_the_end, as_they_come = make(), make()
    one, other = ContributionBuffer(at_the_end), ContributionBuffer(as_they_come)
    added = 0
    for version in range(3):
        grants = [10 * version + number for number in range(1, 7)]
        empty = set(rng.choice(grants, 2, replace=False).tolist())
        here: set[int] = set(empty)
        for grant in rng.permutation(grants).tolist():
            here.add(grant)
            if grant in empty:
                continue
            (contribution,) = contributions(1, grant)
            one.put(grant, contribution)
            in_order = all(lower in here for lower in grants if lower < grant)
            added += in_order
            passing = contribution.copy()
            other.put(grant, passing, in_order=in_order)
            if in_order:
                passing[:] = np.nan
        assert len(one) == len(other) == 4
        order = update(*[(grant, "" if grant in empty else "k", 4) for grant in grants], scale=1 / 24)
        assert one.apply(order) == other.apply(order) == 24
        assert len(one) == len(other) == 0
        assert at_the_end.weights.tobytes() == as_they_come.weights.tobytes()
    assert added >= 3, "the first one of each update is in order"


def test_a_contribution_that_was_added_to_another_update_is_an_error(make: Callable[[], Updater]) -> None:
    buffer = ContributionBuffer(make())
    for number, contribution in enumerate(contributions(2), start=1):
        buffer.put(number, contribution, in_order=True)
    with pytest.raises(RuntimeError, match=r"its first ones, in its order; got that of grant 1"):
        buffer.apply(update((2, "", 4), (3, "", 4)))


def test_a_dropped_contribution_is_applied_by_no_update(make: Callable[[], Updater]) -> None:
    buffer = ContributionBuffer(make())
    buffer.put(1, contributions(1)[0])
    buffer.drop(1)
    assert len(buffer) == 0
    with pytest.raises(KeyError):
        buffer.drop(1)
