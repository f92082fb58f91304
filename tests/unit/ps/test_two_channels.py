"""Random interleavings over two channels, with the model compared at every version, for every policy; tables, sets,
waves and filters included.

A slice runs by default. `DOLL_FUZZ=1` plays 10,000 interleavings of each policy, `DOLL_FUZZ=<n>` others.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import channel_process
import doll.consumers.protocol.worker_core
import doll.consumers.tables.row_cache
import doll.ps.tables.store
import doll.storage.sections
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from channel_process import POLICIES, WORKERS
from channel_world import World, play
from distributions import install_wheel
from doll.config.policy import POLICIES as REGISTERED
from doll.consumers.compute.step_model import StepModel
from doll.consumers.protocol.grants import WorkerGrants
from doll.consumers.protocol.worker_core import StoreRest, WorkerAction, WorkerCore
from doll.consumers.tables.row_cache import RowCache
from doll.consumers.tables.table_rows import WorkerTables
from doll.optim.significance_filter import Residual
from doll.optim.top_k import TopK
from doll.ps.engine.durability import Settling
from doll.ps.engine.engine import Engine
from doll.ps.tables.number_changes import NumberChanges
from doll.records.control import Grant, Push, Settle
from doll.storage.deltas import Delta
from expected_model import Difference
from fuzzing import SEED, SHARE
from paths import SUPPORT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]  # loads torch

INTERLEAVINGS = 10_000 if SHARE == 1.0 else 25
THIRD_PARTY = {"bounded_lead": "{name: bounded_lead, lead: 2, eager: true}", "few_at_once": "{name: few_at_once}"}


_SEND = TopK.send


class Steady(World):
    """No partitions are added and no workers released: the interleaving of a seed is that of before they could be."""

    adds_and_releases = False


def check(policy: str) -> Counter[str]:
    """What has happened in all interleavings."""
    counts: Counter[str] = Counter()
    for number in range(INTERLEAVINGS):
        seed = SEED * 1_000_000 + number
        try:
            counts += play(policy, seed).counts
        except Exception as exc:
            raise AssertionError(f"policy {policy!r}, seed {seed}: {type(exc).__name__}: {exc}") from exc
    assert min(counts["updates"], counts["links"], counts["copies"]) >= INTERLEAVINGS // 2, counts
    return counts


@pytest.mark.parametrize("policy", POLICIES)
def test_the_model_is_the_sum_of_its_batches_whatever_overtakes_whatever(policy: str) -> None:
    counts = check(policy)
    assert counts["groups of several versions"] or policy != "doll, recent"


def test_the_policy_knows_of_what_is_withdrawn_before_it_starts_a_batch() -> None:
    """A partition that was to move had a gradient at the server: what was waiting of it was started all the same."""
    play("doll, sets", 100000, Steady)


@pytest.mark.parametrize("policy", THIRD_PARTY)
def test_under_the_policies_of_others_too(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_wheel(SUPPORT / "third_party_policy", tmp_path)
    REGISTERED.refresh()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(channel_process.POLICIES, policy, THIRD_PARTY[policy])
    try:
        check(policy)
    finally:
        monkeypatch.undo()
        REGISTERED.refresh()
        for name in [name for name in sys.modules if name.startswith(("bounded_lead", "few_at_once"))]:
            del sys.modules[name]


# --- would it be seen? ------------------------------------------------------------------------------------------------


class Forgetful(WorkerGrants):
    """As before ADR 42: forgets the answer to a grant once it is in the model, and computes a late copy."""

    def take(self, grant: Grant) -> tuple[list[Push], list[tuple[Grant, range]]]:
        self._answered = {batch: push for batch, push in self._answered.items() if batch >= grant.included}
        return super().take(grant)


class Unguarded(StepModel):
    """Makes the step of a batch that is in the model."""

    _included = property(lambda self: 0, lambda self, value: None)


def found(policy: str, seeds: int, is_it: Callable[[Exception], bool]) -> bool:
    """Whether an interleaving of the first `seeds` fails in this way."""
    for seed in range(seeds):
        try:
            play(policy, seed)
        except Exception as exc:
            if is_it(exc):
                return True
    return False


def is_difference(of: str) -> Callable[[Exception], bool]:
    return lambda exc: isinstance(exc, Difference) and of in str(exc)


@pytest.mark.parametrize(
    ("policy", "of"),
    [("wsp", "version"), ("isp", "version"), ("ssp", "row"), ("wsp", "row"), ("asp, steps", "row")],
)
def test_a_worker_that_computes_late_copies_is_caught(policy: str, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doll.consumers.protocol.worker_core, "WorkerGrants", Forgetful)
    monkeypatch.setattr(channel_process, "StepModel", Unguarded)
    monkeypatch.setattr(Residual, "_expect_newest", lambda self, batch: None)
    assert found(policy, 1500, is_difference(of))


class OldCount(WorkerCore):
    """Takes newer weights for a batch, with the count of own batches of the grant that the batch has."""

    def newest(self, grant: Grant) -> Grant:
        return msgspec.structs.replace(super().newest(grant), included=grant.included)


def test_a_worker_that_adds_own_steps_to_weights_that_hold_them_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "core_class", OldCount)
    assert found("ssp, ahead", 400, is_difference("view of"))


def test_a_worker_that_keeps_steps_behind_one_that_is_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepModel, "_forget_from", lambda self, batch: False)
    monkeypatch.setattr(StepModel, "_expect_later", lambda self, batch: None)
    assert found("ssp, ahead", 400, is_difference("view of"))


def test_what_holds_the_steps_refuses_late_copies_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two guards, each of which is enough."""
    monkeypatch.setattr(doll.consumers.protocol.worker_core, "WorkerGrants", Forgetful)
    for policy in ("wsp", "isp", "ssp"):
        for seed in range(40):
            play(policy, seed)


@pytest.mark.parametrize(("method", "of"), [("take_back", "version"), ("below", "view")])
def test_sparse_rounds_that_keep_void_changes_or_lose_the_rest_are_caught(
    method: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TopK, method, lambda self, batch: None)
    assert found("diloco, sparse", 400, is_difference(of))


def test_sparse_rounds_that_count_a_change_wholly_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the number of workers, as if each were the only one."""
    monkeypatch.setattr(TopK, "send", _as_if_alone)
    assert found("diloco, sparse", 100, is_difference("version"))


def _as_if_alone(of: TopK, change: npt.NDArray[np.float32], batch: int, *, included: int, whole: bool = False) -> None:
    change *= WORKERS
    _SEND(of, change, batch, included=included, whole=whole)


def test_a_view_that_lacks_what_is_held_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residual, "add_to", lambda self, weights: None)
    assert found("isp", 100, is_difference("view"))


def test_rows_that_lack_what_is_held_back_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowCache, "_add_own", lambda self, ids, rows: self.own.add_to(ids, rows))
    assert found("isp", 400, is_difference("row"))


@pytest.fixture
def always_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to rows that are known hold numbers, also where rows would be shorter: these tables are small."""
    monkeypatch.setattr(doll.ps.tables.store, "is_patch_shorter", lambda is_there: True)
    monkeypatch.setattr(doll.storage.sections, "is_patch_shorter", lambda is_there: True)


@pytest.mark.usefixtures("always_patched")
def test_rows_of_which_numbers_are_sent_are_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever overtakes whatever, also without a checksum that would show it."""
    differences, patches = [], 0
    are_patched = doll.consumers.tables.row_cache._are_patched

    def counted(*args: Any) -> bool:
        nonlocal patches
        patches += 1
        differences.append(not are_patched(*args))
        return True

    monkeypatch.setattr(doll.consumers.tables.row_cache, "_are_patched", counted)
    for seed in range(130 if INTERLEAVINGS < 1000 else INTERLEAVINGS):
        play("isp", seed)
    assert patches > 50
    assert not any(differences)


@pytest.mark.usefixtures("always_patched")
def test_a_server_that_leaves_out_what_others_have_changed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    since = NumberChanges.since

    def without_the_last(self: NumberChanges, slots: Any, versions: Any, author: int) -> npt.NDArray[np.bool_]:
        is_changed = since(self, slots, versions, author)
        is_changed[-1:] = False
        return is_changed

    monkeypatch.setattr(NumberChanges, "since", without_the_last)
    for seed in range(60):  # the checksum shows it, and rows are asked for whole
        play("isp", seed)
    monkeypatch.setattr(doll.consumers.tables.row_cache, "checksum_of", lambda rows: 0)
    monkeypatch.setattr(doll.ps.tables.store, "checksum_of", lambda rows: 0)
    assert found("isp", 400, is_difference("row"))


def test_a_rest_of_rows_that_stays_at_its_worker_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerTables, "rest", lambda self, until: {})
    assert found("isp", 400, is_difference("table"))


def test_weights_that_lack_a_change_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    write_to = Delta.write_to

    def without_the_first(delta: Delta, weights: npt.NDArray[np.float32]) -> None:
        write_to(delta._replace(ids=delta.ids[1:], values=delta.values[1:]), weights)

    monkeypatch.setattr(Delta, "write_to", without_the_first)
    assert found("isp", 100, is_difference("view"))


@pytest.mark.parametrize(("is_seen_at_once", "of"), [(True, "view of"), (False, "its view lacked")])
def test_a_server_that_asks_for_rests_while_grants_stand_is_caught(
    is_seen_at_once: bool, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_if_due = Engine._save_if_due

    def asks_early(engine: Engine) -> None:
        save_if_due(engine)
        if engine._settling.is_under_way and engine._grants:
            engine._actions.extend(engine._settling.ask(engine._now))

    monkeypatch.setattr(Engine, "_save_if_due", asks_early)
    if not is_seen_at_once:
        monkeypatch.setattr(World, "stands", lambda self, *grant: False)
    assert found("isp", 400, is_difference(of))


class AsksTwice(WorkerCore):
    """As before ADR 42: stores a rest for every Settle, and the newest one is the rest."""

    def _on_settle(self, order: Settle) -> list[WorkerAction]:
        self._settled_until = 0
        return [StoreRest(order.term, order.until)]


def test_a_second_settle_that_takes_the_place_of_the_first_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "core_class", AsksTwice)
    monkeypatch.setattr(Residual, "_expect_newest", lambda self, batch: None)
    lost_before_durable = lambda exc: isinstance(exc, AssertionError)  # noqa: E731
    assert found("isp", 1500, lost_before_durable)


def test_a_server_that_takes_an_empty_rest_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "core_class", AsksTwice)
    monkeypatch.setattr(Residual, "_expect_newest", lambda self, batch: None)
    monkeypatch.setattr(Settling, "holds_back", lambda self, worker: False)
    assert found("isp", 400, is_difference("version"))


def test_the_interleavings_reach_what_they_are_for() -> None:
    """Otherwise the tests above would prove little."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        for policy in ("wsp", "isp"):
            seen += play(policy, seed).counts
    for seed in range(20):
        seen += play("essp, ahead", seed).counts
    expected = {
        "begun ahead of a push", "weights of a later grant", "copies", "links", "late messages", "rests",
        "rests of leaving workers", "settles", "rolled back", "checkpoints", "servers", "processes",
        "sets of several batches", "views", "rows", "weights missing",
        "refused_late", "refused_duplicate", "grants_sent_again", "partitions added",
    }  # fmt: skip
    assert expected <= set(seen), expected - set(seen)
