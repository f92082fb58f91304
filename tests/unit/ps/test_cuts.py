"""Batches that are cut, in random interleavings: the audit and the model are exact, whoever reads them again."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from channel_process import POLICIES as CHANNEL_POLICIES
from channel_world import World as ChannelWorld
from channel_world import play as play_channels
from doll.ps.engine import state
from doll.ps.engine.assignment import as_they_stand
from doll.ps.engine.partition_state import PartitionState
from engine_runs import check_random_run
from engine_world import POLICIES
from fuzzing import SHARE
from ledger_world import LedgerWorld
from msgspec import structs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]  # loads torch


class CutWorld(LedgerWorld):
    """Batches of three records, of which many are cut."""

    def __init__(self, policy: str, seed: int) -> None:
        super().__init__(policy, records_per_batch=3)
        self.share_cut, self.cut_rng = 0.3, random.Random(seed)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_record_is_applied_exactly_once_whatever_is_cut(policy: str) -> None:
    cut = 0
    for seed in range(400 if SHARE == 1.0 else 8):
        world = CutWorld(policy, seed)
        check_random_run(POLICIES[policy], seed, 1500, world=world)
        report = world.audit()
        assert report.violations() == []
        cut += sum(member.cut for record in world.records if hasattr(record, "members") for member in record.members)
    assert cut > 20


class CutsOften(ChannelWorld):
    """Half of what may be cut is cut, and processes are lost often."""

    def __init__(self, policy: str, seed: int, *, has_tables: bool = False) -> None:
        super().__init__(policy, seed, has_tables=has_tables)
        self.share_cut = 0.5

    def step(self) -> None:
        super().step()
        if self.cut_rng.random() < 0.01:
            self.end(self.cut_rng.choice(self.live()))


def counts(policy: str, seeds: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(seeds):
        try:
            seen += play_channels(policy, seed, CutsOften).counts
        except Exception as exc:
            raise AssertionError(f"policy {policy!r}, seed {seed}: {type(exc).__name__}: {exc}") from exc
    return seen


@pytest.mark.parametrize("policy", CHANNEL_POLICIES)
def test_the_model_is_that_of_the_batches_that_the_server_means(policy: str) -> None:
    seen = counts(policy, 1000 if SHARE == 1.0 else 15)
    assert seen["cuts applied"] > 0


def test_the_interleavings_read_batches_in_two_ways() -> None:
    seen: Counter[str] = Counter()
    for policy in ("asp", "ssp", "wsp"):
        seen += counts(policy, 60)
    expected = {"read in two ways", "computed in two ways", "refused_announce", "scaled"}
    assert expected <= set(+seen), seen


# --- would it be seen? ------------------------------------------------------------------------------------------------


def is_caught(policies: tuple[str, ...] = ("asp", "bsp"), seeds: int = 8) -> bool:
    """Whether a random run with cuts fails, or its audit does."""
    for policy in policies:
        for seed in range(seeds):
            world = CutWorld(policy, seed)
            try:
                check_random_run(POLICIES[policy], seed, 1500, world=world)
            except (AssertionError, ValueError):
                return True
            if world.audit().violations():
                return True
    return False


def test_a_checkpoint_that_does_not_say_what_cuts_have_left_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "as_they_stand", lambda *args: structs.replace(as_they_stand(*args), left_out=()))
    assert is_caught()


def test_a_server_that_keeps_cuts_of_batches_that_it_has_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget_waiting(partition: PartitionState) -> None:
        partition.announced = partition.granted

    monkeypatch.setattr(PartitionState, "forget_waiting", forget_waiting)
    assert is_caught()


def refused_after_a_restart() -> int:
    """Announcements that the server refuses of a new process, where a batch that was cut before is not durable."""
    world = CutWorld("asp", 0)

    def go_on(records: int, share_cut: float) -> None:
        world.high[0] += records
        world.share_cut = share_cut
        for _ in range(40):
            (process,) = world.processes[0]
            world.send(process)
            world.receive_next(process)
            world.read(process)
            world.compute(process)

    go_on(2, 1.0)
    assert world.engine.version > world.engine.durable_version
    world.kill_worker(0)
    world.start_process(0)
    go_on(10, 0.0)
    return world.engine.counters["refused_announce"]


def test_a_welcome_that_does_not_name_what_is_decided_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused_after_a_restart() == 0
    served = PartitionState.served
    monkeypatch.setattr(
        PartitionState, "served", lambda self, end=0: structs.replace(served(self, end), decided=0, cuts=())
    )
    assert refused_after_a_restart() > 0
