"""What a checkpoint has learned of each partition, from records: as if only the valid updates had been read."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from doll.ledger.lineage import UpdatesRecord
from doll.monitor.state import run_counts
from doll.monitor.state.run_counts import PartitionCounts, RunCounts
from doll.records.control import Finished, Member, TermStarted, Update


def started(term: int, resumed: int = 0, rolled_back_to: int = -1) -> TermStarted:
    return TermStarted(
        term=term, resumed_version=resumed, origins=(0, 0), records_per_batch=8, time_s=0.0,
        rolled_back_to=rolled_back_to,
    )  # fmt: skip


def member(partition: int, batch: int, dead: int = 0) -> Member:
    lo = 8 * batch
    return Member(
        worker=0, partition=partition, batch=batch, lo=lo, hi=lo + 8, base_version=0, n_samples=8 - dead,
        dead=tuple(range(lo, lo + dead)),
    )  # fmt: skip


def update(term: int, version: int, *members: Member) -> Update:
    return Update(term=term, version=version, members=members, n_samples=0, loss=0.0)


def fed(counts: RunCounts, records: Iterable[UpdatesRecord]) -> RunCounts:
    assert all(counts.feed(record) for record in records)
    return counts


def test_an_update_counts_when_it_is_in_a_checkpoint() -> None:
    counts = fed(RunCounts(), [started(1), *(update(1, n, member(0, n - 1, dead=2)) for n in (1, 2, 3))])
    assert (counts.version, counts.partitions, counts.samples) == (0, {}, 0)
    counts.saved(1, 2)
    assert (counts.version, counts.samples) == (2, 12)
    assert counts.partitions == {0: PartitionCounts([(0, 16)], samples=12, dead_letters=4)}
    fed(counts, [update(1, 4, member(1, 0)), Finished(term=1, version=4, reason="r", time_s=0)])
    counts.saved(1, 4)
    assert (counts.version, counts.partitions[0].applied, counts.partitions[1].applied) == (4, [(0, 24)], [(0, 8)])


def test_what_a_resumed_server_repeats_counts_once() -> None:
    counts = fed(RunCounts(), [started(1), *(update(1, n, member(0, n - 1)) for n in (1, 2, 3, 4))])
    counts.saved(1, 1)
    fed(counts, [started(2, resumed=2)])
    assert (counts.version, counts.samples) == (2, 16)
    counts.saved(2, 4)
    fed(counts, [update(2, 3, member(1, 0)), update(2, 4, member(0, 2))])
    assert {number: each.applied for number, each in counts.partitions.items()} == {0: [(0, 24)], 1: [(0, 8)]}


def test_a_status_may_come_before_the_updates_of_its_server_and_of_earlier_ones() -> None:
    counts = RunCounts()
    counts.saved(2, 3)
    fed(counts, [started(1), update(1, 1, member(0, 0)), update(1, 2, member(0, 1, dead=8))])
    assert counts.version == 0, "the status is of another server"
    fed(counts, [started(2, resumed=1), update(2, 2, member(0, 1)), update(2, 3, member(0, 2))])
    assert (counts.version, counts.samples) == (3, 24)


def test_a_rollback_of_counted_updates_asks_for_all_records_again() -> None:
    records: list[UpdatesRecord] = [started(1), *(update(1, n, member(0, n - 1)) for n in (1, 2, 3))]
    counts = fed(RunCounts(), records)
    counts.saved(1, 3)
    records += [started(2, resumed=4, rolled_back_to=1)]
    assert not counts.feed(records[-1])
    counts.begin()
    fed(counts, records)
    assert (counts.version, counts.partitions[0].applied, counts.samples) == (4, [(0, 8)], 8)
    fed(counts, [update(2, 5, member(0, 3))])  # --skip: it begins behind what is left out
    counts.saved(2, 5)
    assert counts.partitions[0].applied == [(0, 8), (24, 32)]


def test_memory_has_a_limit_if_no_checkpoint_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_counts, "_MAX_UNSAVED", 5)
    counts = fed(RunCounts(), [started(1), *(update(1, n, member(0, n - 1)) for n in range(1, 21))])
    assert (counts.version, len(counts._unsaved)) == (15, 5)


@pytest.mark.parametrize("seed", range(30))
def test_any_history_gives_the_counts_of_its_valid_updates(seed: int) -> None:
    rng = random.Random(seed)
    records: list[tuple[UpdatesRecord, int]] = []  # with the durable version at this time
    kept: list[tuple[int, tuple[Member, ...]]] = []
    version = durable = next_version = 0
    for term in range(1, 8):
        if term > 1 and rng.random() < 0.3:
            to = rng.randint(0, durable)
            kept = [item for item in kept if item[0] <= to]
            version = durable = next_version + 1
            record = started(term, version, rolled_back_to=to)
        else:
            kept = [item for item in kept if item[0] <= durable]
            version = durable
            record = started(term, version)
        records.append((record, durable))
        for _ in range(rng.randint(0, 6)):
            version += 1
            members = tuple(member(n, sum(len(item[1]) > n for item in kept)) for n in range(rng.randint(1, 2)))
            kept.append((version, members))
            records.append((update(term, version, *members), durable))
            if rng.random() < 0.5:
                durable = version
        next_version = max(next_version, version)
    counts, pending = RunCounts(), list(records)
    rounds = 0
    while pending:
        next_record, saved = pending.pop(0)
        if not counts.feed(next_record):
            counts.begin()
            pending, rounds = list(records), rounds + 1
        elif rng.random() < 0.5:
            counts.saved(next_record.term, saved)
    counts.saved(7, durable)
    expected: dict[int, PartitionCounts] = {}
    for number, members in kept:
        for each in members if number <= durable else ():
            expected.setdefault(each.partition, PartitionCounts()).add(each)
    assert counts.partitions == expected
    assert counts.version == durable
    assert rounds <= 7
