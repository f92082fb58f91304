"""Worked examples of rollbacks in the ledger: what is left, what is skipped, and what does not fit."""

from __future__ import annotations

from doll.ledger.balance import Ledger, Range
from doll.ledger.lineage import UpdatesRecord
from doll.ledger.valid_updates import DurableModel
from doll.records.bounds import Grid
from doll.records.control import Member, TermStarted, Update
from doll.records.rollbacks import Rollback
from msgspec.structs import replace
from record_builders import balance, dead_letter, update


def grid(version: int, *applied: int, origins: tuple[int, int] = (0, 0), skipped: tuple[int, ...] = ()) -> Grid:
    return Grid(version=version, records_per_batch=10, origins=origins, applied=applied, skipped=skipped)


def up(by: int, version: int, *batches: tuple[int, int]) -> Update:
    return update(by, version, *batches, records_per_batch=10)


def began(term: int, resumed: int, grid: int = 0, origins: tuple[int, int] = (0, 0)) -> TermStarted:
    return TermStarted(
        term=term, resumed_version=resumed, origins=origins, records_per_batch=10, time_s=0.0, grid=grid
    )  # fmt: skip


def learned(term: int, version: int, partition: int, lo: int) -> Update:
    """The first batch of a grid that begins at `lo`."""
    batch = Member(
        worker=partition, partition=partition, batch=0, lo=lo, hi=lo + 10, n_samples=10, base_version=version - 1
    )  # fmt: skip
    return Update(term=term, version=version, members=(batch,), n_samples=10, loss=1.0)


BEFORE: tuple[TermStarted, Update, Update, Update] = (began(1, 0), up(1, 1, (0, 0)), up(1, 2, (1, 0)), up(1, 3, (0, 1)))
SKIP = Rollback(to=1, grid=0, version=4, term=2, skipped=True)
REPLAY = Rollback(to=1, grid=0, version=4, term=2)
# Version 4 is version 1 again: offsets 10 to 19 of both partitions were learned since.
SKIPPED = DurableModel(
    term=2, version=4, applied=(0, 0), origins=(20, 10), records_per_batch=10,
    earlier_grids=(grid(1, 1, 0, skipped=(10, 10)),), rollbacks=(SKIP,),
)  # fmt: skip
AGAIN = DurableModel(
    term=2, version=4, applied=(0, 0), origins=(10, 0), records_per_batch=10, earlier_grids=(grid(1, 1, 0),),
    rollbacks=(REPLAY,),
)  # fmt: skip


def test_what_was_learned_since_is_skipped_with_a_reason() -> None:
    report = balance(durable=SKIPPED, ends=(40, 40), records=BEFORE, dead_letters=[])
    assert report.ok, report.violations()
    assert (report.applied, report.skipped, report.pending, report.voided) == (10, 20, 50, 2)
    assert report.produced == report.applied + report.skipped + report.pending
    assert report.skipped_ranges == (Range(0, 10, 20), Range(1, 0, 10))
    assert "20 skipped by doll rollback" in report.summary()
    assert report.rolled_back() == [
        "version 4 is version 1 again (doll rollback): the samples since then are skipped",
        "skipped by doll rollback: partition 0: 10-19, partition 1: 0-9",
    ]
    assert [line.skipped for line in report.partitions] == [10, 10]


def test_what_was_learned_since_is_to_come_again() -> None:
    report = balance(durable=AGAIN, ends=(40, 40), records=BEFORE, dead_letters=[])
    assert report.ok, report.violations()
    assert (report.applied, report.skipped, report.pending, report.voided) == (10, 0, 70, 2)


def test_the_next_server_goes_on_behind_the_number_that_was_given() -> None:
    for durable, origins in ((SKIPPED, (20, 10)), (AGAIN, (10, 0))):
        later = replace(durable, term=3, version=6, applied=(1, 1))
        records: list[UpdatesRecord] = [
            *BEFORE, began(3, 4, 1, origins),
            learned(3, 5, 0, origins[0]),
            learned(3, 6, 1, origins[1]),
            up(1, 4, (1, 1)),  # of the server before, which was fenced
        ]  # fmt: skip
        report = balance(durable=later, ends=(40, 40), records=records, dead_letters=[])
        assert report.ok, report.violations()
        assert (report.updates, report.applied, report.voided) == (3, 30, 3)


def test_an_offset_that_is_skipped_must_not_be_learned() -> None:
    later = replace(SKIPPED, term=3, version=5, applied=(1, 0))
    wrong = learned(3, 5, 0, 10)
    report = balance(durable=later, ends=(40, 40), records=[*BEFORE, began(3, 4, 1, (20, 10)), wrong], dead_letters=[])
    assert any("applied by updates, but not counted in the checkpoint" in problem for problem in report.problems)
    assert report.missing == (Range(0, 20, 30),)


def test_without_its_rollback_the_same_checkpoint_does_not_fit() -> None:
    report = balance(durable=replace(SKIPPED, rollbacks=()), ends=(40, 40), records=BEFORE, dead_letters=[])
    assert any("versions 4 to 4 are in the durable model" in problem for problem in report.problems)
    gap = replace(AGAIN, origins=(20, 0))
    report = balance(durable=gap, ends=(40, 40), records=BEFORE, dead_letters=[])
    assert any("ends at offset 9, and goes on at 20" in problem for problem in report.problems)


def test_a_dead_letter_of_what_was_skipped_is_no_letter_of_the_model() -> None:
    ledger = Ledger(SKIPPED, BEFORE)
    ledger.add_dead_letter(dead_letter(0, 12))
    report = ledger.report((40, 40))
    assert report.ok, report.violations()
    assert (report.dead, report.superseded) == (0, 0)
    assert [ledger.offset_state(0, offset) for offset in (5, 12, 25)] == ["applied", "skipped", "pending"]


def test_a_second_rollback_leaves_the_first_one_and_grids_in_it() -> None:
    """From version 6, behind a rollback, to version 1 once more."""
    again = Rollback(to=1, grid=0, version=7, term=4)
    durable = DurableModel(
        term=4, version=7, applied=(0, 0), origins=(10, 0), records_per_batch=10,
        earlier_grids=(grid(1, 1, 0), grid(1, 0, 0, origins=(10, 0))), rollbacks=(again,),
    )  # fmt: skip
    records: list[UpdatesRecord] = [
        *BEFORE, began(3, 4, 1, (20, 10)),
        learned(3, 5, 0, 20),
    ]  # fmt: skip
    report = balance(durable=durable, ends=(40, 40), records=records, dead_letters=[])
    assert report.ok, report.violations()
    assert (report.applied, report.skipped, report.voided) == (10, 0, 3)


FORGOT = Rollback(to=3, grid=0, version=4, term=2, forgot=(((3, 5), (12, 13)), ((9, 10),)))
# Version 4 is version 3 without four records of partition 0 and 1.
FORGETFUL = DurableModel(
    term=2, version=4, applied=(0, 0), origins=(20, 10), records_per_batch=10,
    earlier_grids=(grid(3, 2, 1),), rollbacks=(FORGOT,),
)  # fmt: skip


def test_records_that_were_removed_count_apart() -> None:
    report = balance(durable=FORGETFUL, ends=(40, 40), records=BEFORE, dead_letters=[])
    assert report.ok, report.violations()
    assert (report.applied, report.forgotten, report.pending, report.voided) == (26, 4, 50, 0)
    assert report.produced == report.applied + report.forgotten + report.pending
    assert report.forgotten_ranges == (Range(0, 3, 5), Range(0, 12, 13), Range(1, 9, 10))
    assert "26 applied exactly once, 4 removed by doll forget" in report.summary()
    assert report.rolled_back() == [
        "version 4 is version 3 without 4 of its records (doll forget)",
        "removed by doll forget: partition 0: 3-4, partition 0: 12, partition 1: 9",
    ]
    ledger = Ledger(FORGETFUL, BEFORE)
    states = [ledger.offset_state(0, offset) for offset in (2, 3, 12, 13, 25)]
    assert states == ["applied", "forgotten", "forgotten", "applied", "pending"]


def test_a_record_that_was_dead_is_not_removed_again() -> None:
    batch = replace(BEFORE[2].members[0], dead=(9,), n_samples=9)
    records: list[UpdatesRecord] = [*BEFORE[:2], replace(BEFORE[2], members=(batch,), n_samples=9), BEFORE[3]]
    report = balance(durable=FORGETFUL, ends=(40, 40), records=records, dead_letters=[dead_letter(1, 9)])
    assert report.ok, report.violations()
    assert (report.applied, report.forgotten, report.dead) == (26, 3, 1)
