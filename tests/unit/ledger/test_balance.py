"""Worked examples of the balance: what a report says, what is void, missing, pending, lost or refused."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
import record_builders
from doll.ledger.balance import Ledger, LedgerReport, Range
from doll.ledger.valid_updates import DurableModel
from doll.records.control import Finished, Member, TermStarted, Update
from record_builders import balance, dead_letter


def term_started(number: int, resumed: int = 0) -> TermStarted:
    return record_builders.term_started(number, resumed, records_per_batch=10)


def update(by: int, version: int, *batches: tuple[int, int]) -> Update:
    return record_builders.update(by, version, *batches, records_per_batch=10)


def durable(term: int, version: int, *applied: int) -> DurableModel:
    return DurableModel(term=term, version=version, applied=applied, origins=(0, 0), records_per_batch=10)


def audit(
    model: DurableModel, *records: TermStarted | Update | Finished, ends: tuple[int, int] = (100, 100)
) -> LedgerReport:
    return balance(durable=model, ends=ends, records=records, dead_letters=[])


def test_the_summary_reads_as_documented() -> None:
    report = audit(durable(1, 1, 1, 1), term_started(1), update(1, 1, (0, 0), (1, 0)), ends=(25, 10))
    assert report.summary() == (
        "audit: 35 offsets produced, 20 applied exactly once, 15 not yet applied, 0 missing, 0 twice, 0 dead-lettered"
    )
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["ok"] is True
    assert plain["partitions"][0]["pending"] == 15


def test_updates_after_the_checkpoint_are_not_durable_yet() -> None:
    report = audit(durable(1, 1, 1, 0), term_started(1), update(1, 1, (0, 0)), update(1, 2, (0, 1)))
    assert report.ok
    assert (report.updates, report.unsaved, report.applied, report.pending) == (1, 1, 10, 190)


def test_a_job_that_has_only_its_first_checkpoint() -> None:
    report = audit(durable(1, 0, 0, 0), term_started(1), update(1, 1, (0, 0)))
    assert report.ok
    assert report.pending == 200


@pytest.mark.parametrize(
    ("records", "recorded"),
    [
        ([term_started(1)], "records the start of a parameter server: "),
        ([term_started(1), update(1, 1, (0, 0))], "records the start of a parameter server, 1 updates: "),
        (
            [term_started(1), update(1, 1, (0, 0)), Finished(term=1, version=1, reason="", time_s=0)],
            "the start of a parameter server, 1 updates, the job's end at version 1: ",
        ),
    ],
)
def test_records_without_any_checkpoint_are_a_problem_that_names_the_folder(
    records: list[TermStarted | Update | Finished], recorded: str
) -> None:
    """A server saves version 0 before its first record: the checkpoints are lost, or in another folder."""
    report = audit(msgspec.structs.replace(durable(0, 0, 0, 0), location="/runs/x/checkpoints"), *records)
    assert not report.ok
    (problem,) = report.problems
    assert problem.startswith("no checkpoint was found in /runs/x/checkpoints, but the topic updates ")
    assert recorded in problem
    assert "doll audit RUN" in problem


def test_nothing_is_wrong_before_the_first_server() -> None:
    assert audit(durable(0, 0, 0, 0)).ok


def test_updates_lost_in_a_crash_are_void_and_done_again_otherwise() -> None:
    report = audit(
        durable(2, 2, 1, 1),
        term_started(1),
        update(1, 1, (0, 0)),
        update(1, 2, (0, 1)),  # lost: the checkpoint was of version 1
        term_started(2, resumed=1),
        update(1, 3, (0, 2)),  # the fenced server has not noticed yet
        update(2, 2, (1, 0)),
    )
    assert report.ok
    assert (report.voided, report.applied) == (2, 20)


def test_a_term_of_a_server_that_lost_the_race_changes_nothing() -> None:
    assert audit(durable(3, 1, 1, 0), term_started(3), term_started(2), update(3, 1, (0, 0))).ok


@pytest.mark.parametrize(
    ("model", "records", "says"),
    [
        (durable(1, 20, 1, 0), [term_started(1), update(1, 20, (0, 0))], "versions 1 to 19 are in the durable model"),
        (durable(1, 1, 1, 0), [], "versions 1 to 1 are in the durable model"),
        (
            durable(1, 2, 2, 0),
            [term_started(1), update(1, 1, (0, 0)), update(1, 1, (0, 0)), update(1, 2, (0, 1))],
            "term 1 records version 1 after version 1",
        ),
        (durable(1, 1, 1, 0), [update(1, 1, (0, 0))], "no record says from which version term 1 began"),
        (
            durable(1, 1, 1, 0),
            [term_started(1), term_started(1), update(1, 1, (0, 0))],
            "two servers had the same term",
        ),
        (
            durable(1, 2, 2, 0),
            [
                term_started(1),
                update(1, 1, (0, 0)),
                update(1, 2, (0, 1)),
                term_started(2, resumed=1),
                update(2, 2, (0, 1)),
            ],
            "term 2 began again from version 1, but the newest checkpoint is of version 2, term 1",
        ),
        (
            durable(1, 1, 1, 0),
            [term_started(1), update(1, 1, (0, 0)), Finished(term=1, version=2, reason="", time_s=0)],
            "the job ended at version 2, but the newest checkpoint is of version 1",
        ),
        (
            durable(1, 1, 11, 0),
            [term_started(1), update(1, 1, *((0, j) for j in range(11)))],
            "reaches offset 109, but the log ends at 100",
        ),
        (
            durable(1, 1, 1, 0), [term_started(1), update(1, 1, (0, 0), (7, 0))],
            "expected a partition from 0 to 1, got 7",
        ),
        (
            durable(1, 1, 1, 0),
            [msgspec.structs.replace(term_started(1), origins=(5, 0)), update(1, 1, (0, 0))],
            "began with origins [5, 0]",
        ),
        (
            durable(1, 1, 1, 0),
            [term_started(1), msgspec.structs.replace(update(1, 1, (0, 0)), n_samples=9)],
            "do not have the 9 samples",
        ),
    ],
)  # fmt: skip
def test_what_else_does_not_fit_is_said(model: DurableModel, records: list[Any], says: str) -> None:
    report = audit(model, *records)
    assert not report.ok
    assert says in " ".join(report.problems)


def test_offsets_named_outside_their_batch_are_noticed() -> None:
    for change in ({"dead": (10,)}, {"gaps": ((8, 12),)}, {"gaps": ((4, 4),)}, {"lost": ((9, 11),)}):
        record = update(1, 1, (0, 0))
        record = msgspec.structs.replace(record, members=(msgspec.structs.replace(record.members[0], **change),))
        assert "names offsets outside itself" in " ".join(audit(durable(1, 1, 1, 0), term_started(1), record).problems)


def test_a_record_in_a_range_said_to_hold_none_is_missing() -> None:
    record = update(1, 1, (0, 0))
    record = msgspec.structs.replace(record, members=(msgspec.structs.replace(record.members[0], gaps=((2, 6),)),))
    arguments: dict[str, Any] = {
        "durable": durable(1, 1, 1, 0),
        "ends": (10, 0),
        "records": [term_started(1), record],
        "dead_letters": [],
    }
    report = balance(**arguments)
    assert report.gap_ranges == (Range(0, 2, 6),)
    assert (report.ok, report.applied, report.gaps) == (True, 6, 4)
    assert report.summary().endswith("0 dead-lettered, 4 without a record")
    report = balance(**arguments, present=[Range(0, 3, 5)])
    assert report.missing == (Range(0, 3, 5),)
    assert (report.ok, report.applied, report.gaps) == (False, 6, 2)


def with_lost(*lost: tuple[int, int]) -> Update:
    record = update(1, 1, (0, 0))
    return msgspec.structs.replace(record, members=(msgspec.structs.replace(record.members[0], lost=lost),))


def test_records_deleted_before_they_were_learned_fail_the_audit_unless_allowed() -> None:
    arguments: dict[str, Any] = {
        "durable": durable(1, 1, 1, 0), "ends": (30, 10), "records": [term_started(1), with_lost((2, 6))],
        "dead_letters": [dead_letter(0, 3)], "lows": (14, 0),
    }  # fmt: skip
    report = balance(**arguments)
    # 2-5 when their batch was read; 10-13 are not in the model yet, and not in the log any more.
    assert report.lost_ranges == (Range(0, 2, 6), Range(0, 10, 14))
    assert (report.ok, report.applied, report.lost, report.pending, report.produced) == (False, 6, 8, 26, 40)
    assert report.superseded == 0
    assert report.violations() == [
        "lost: partition 0: 2-5, partition 0: 10-13: deleted from the log before they were learned "
        "(see data.on_data_loss)"
    ]
    assert "0 twice, 8 lost, 0 dead-lettered" in report.summary()
    allowed = balance(**arguments, loss_allowed=True)
    assert (allowed.ok, allowed.violations(), allowed.lost) == (True, [], 8)
    assert "allowed by data.on_data_loss: skip" in allowed.losses()[0]
    assert json.loads(json.dumps(allowed.to_dict()))["lost_ranges"] == [[0, 2, 6], [0, 10, 14]]


def test_what_an_ended_job_left_unread_may_go() -> None:
    ended: list[TermStarted | Update | Finished] = [
        term_started(1),
        update(1, 1, (0, 0)),
        Finished(term=1, version=1, reason="", time_s=0),
    ]
    report = balance(durable=durable(1, 1, 1, 0), ends=(30, 10), records=ended, dead_letters=[], lows=(30, 10))
    # Partition 0: 10-29, and 1: 0-9; partition 0 holds 8-15 as its first batch.
    assert (report.ok, report.lost, report.pending, report.unread) == (True, 0, 0, 30)
    assert "0 missing, 0 twice, 30 deleted unread, 0 dead-lettered" in report.summary()


def test_what_was_deleted_before_the_job_began_is_counted_and_named() -> None:
    """Records with timestamps of a year ago, which retention deleted before the first server asked for the origins."""
    begun = msgspec.structs.replace(durable(0, 0, 0, 0), origins=(1000, 0))
    arguments: dict[str, Any] = {
        "durable": begun,
        "ends": (1000, 10),
        "records": [],
        "dead_letters": [],
        "lows": (1000, 0),
    }
    report = balance(**arguments, is_whole=True)
    assert (report.produced, report.unread, report.unread_ranges) == (1010, 1000, (Range(0, 0, 1000),))
    assert "1010 offsets produced" in report.summary()
    assert "0 missing, 0 twice, 1000 deleted unread" in report.summary()
    assert report.unread_records() == ["deleted unread, before the job began or after it had ended: partition 0: 0-999"]
    assert balance(**arguments).unread == 0, "the job was to begin with what the log held, or later"


def test_what_is_said_to_be_deleted_must_be() -> None:
    report = balance(
        durable=durable(1, 1, 1, 0),
        ends=(30, 0),
        records=[term_started(1), with_lost((2, 6))],
        dead_letters=[],
        lows=(4, 0),
    )
    assert report.problems == ("deleted by their update, but still in the log: partition 0: 4-5",)


def test_dead_letters_outside_the_job_are_noticed() -> None:
    stray = [dead_letter(0, 100), dead_letter(9, 0)]
    report = balance(durable=durable(0, 0, 0, 0), ends=(100, 100), records=[], dead_letters=stray)
    assert report.problems == (
        "a dead letter names partition 9, expected 0 to 1",
        "dead-lettered, but outside the job's part of the log: partition 0: 100",
    )


def test_a_dead_letter_of_a_batch_that_is_not_applied_yet_is_pending() -> None:
    report = balance(
        durable=durable(1, 0, 0, 0), ends=(10, 0), records=[term_started(1)], dead_letters=[dead_letter(0, 3)]
    )
    assert (report.ok, report.pending, report.dead) == (True, 10, 0)


def test_samples_refused_inside_a_record_need_a_letter_of_their_batch() -> None:
    record = update(1, 1, (0, 0), (0, 1))
    members = tuple(msgspec.structs.replace(member, dead_samples=3) for member in record.members)
    arguments: dict[str, Any] = {
        "durable": durable(1, 1, 2, 0), "ends": (20, 0),
        "records": [term_started(1), msgspec.structs.replace(record, members=members)],
    }  # fmt: skip
    report = balance(**arguments, dead_letters=[dead_letter(0, 4, whole=False)])
    assert report.problems == ("refused in part by their update, but there is no dead letter: partition 0: 10-19",)
    # Two letters of one record, from two processes that found different samples bad: the update's count stands.
    letters = [
        dead_letter(0, 4, whole=False),
        dead_letter(0, 4, whole=False),
        dead_letter(0, 19, whole=False),
        dead_letter(0, 12),
    ]
    report = balance(**arguments, dead_letters=letters)
    assert report.ok
    assert (report.partly_dead_samples, report.superseded, report.applied) == (6, 1, 20)


def test_the_fate_of_an_offset() -> None:
    record = update(1, 1, (0, 0), (0, 1))
    dead, partly = record.members
    members = (
        msgspec.structs.replace(dead, dead=(3,), gaps=((5, 7),)),
        msgspec.structs.replace(partly, dead_samples=1),
    )
    ledger = Ledger(durable(1, 1, 2, 0), [term_started(1), msgspec.structs.replace(record, members=members)])
    assert [ledger.offset_state(0, offset) for offset in (-1, 2, 3, 5, 7, 10, 19, 20)] == [
        "pending", "applied", "dead", "absent", "applied", "partly", "partly", "pending",
    ]  # fmt: skip
    assert (ledger.offset_state(1, 0), ledger.offset_state(9, 0)) == ("pending", "pending")


def test_a_message_names_the_first_ranges_only() -> None:
    report = audit(
        durable(1, 1, 0, 40), term_started(1), update(1, 1, *((1, j) for j in range(0, 40, 2))), ends=(0, 400)
    )
    assert len(report.missing) == 20
    assert report.violations()[0].endswith("partition 1: 150-159, and 12 more ranges")


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 2 counts of applied batches, got 3"):
        Ledger(durable(0, 0, 0, 0, 0), [])
    with pytest.raises(ValueError, match="longer than"):
        balance(durable=durable(0, 0, 0, 0), ends=(1, 2, 3), records=[], dead_letters=[])


@pytest.mark.slow
def test_ten_million_offsets_take_a_moment() -> None:
    """39 k updates of 4 batches of 64: seconds would mean that offsets are looked at one by one."""
    num, rpb, versions = 4, 64, 39_063
    origins = (0,) * num
    records: list[Any] = [TermStarted(term=1, resumed_version=0, origins=origins, records_per_batch=rpb, time_s=0.0)]
    for version in range(1, versions + 1):
        lo = (version - 1) * rpb
        members = tuple(
            Member(
                worker=n, partition=n, batch=version - 1, lo=lo, hi=lo + rpb, n_samples=rpb, base_version=version - 1
            )
            for n in range(num)
        )
        records.append(Update(term=1, version=version, members=members, n_samples=num * rpb, loss=1.0))
    model = DurableModel(term=1, version=versions, applied=(versions,) * num, origins=origins, records_per_batch=rpb)
    start_s = time.process_time()
    report = balance(durable=model, ends=[versions * rpb] * num, records=records, dead_letters=[])
    assert time.process_time() - start_s < 60  # it grows with the records, not with the samples
    assert report.ok
    assert report.applied == 10_000_128


def cut_update(version: int, batch: int, lo: int, hi: int, *, cut: bool) -> Update:
    member = Member(
        worker=0, partition=0, batch=batch, lo=lo, hi=hi, n_samples=hi - lo, base_version=version - 1, cut=cut
    )
    return Update(term=1, version=version, members=(member,), n_samples=hi - lo, loss=1.0)


CUTS: list[TermStarted | Update | Finished] = [
    term_started(1),
    cut_update(1, 0, 0, 10, cut=False),
    cut_update(2, 1, 10, 13, cut=True),
    cut_update(3, 2, 13, 23, cut=False),
    cut_update(4, 3, 23, 24, cut=True),
]


def cut_model(*left_out: int) -> DurableModel:
    return DurableModel(
        term=1, version=4, applied=(4, 0), origins=(0, 0), records_per_batch=10, left_out=left_out or (16, 0)
    )


def test_batches_that_are_cut_follow_each_other() -> None:
    report = balance(durable=cut_model(), ends=(30, 0), records=CUTS, dead_letters=[])
    assert report.violations() == []
    assert (report.applied, report.pending, report.produced) == (24, 6, 30)


@pytest.mark.parametrize(
    ("at", "update", "says"),
    [
        (2, cut_update(2, 1, 10, 13, cut=False), "batch 1 of partition 0 is offsets 10-19, got 10-12"),
        (2, cut_update(2, 1, 10, 20, cut=True), "batch 1 of partition 0 is cut, or full, not both"),
        (2, cut_update(2, 1, 10, 21, cut=True), "batch 1 of partition 0 is offsets 10-19, got 10-20"),
        (3, cut_update(3, 2, 12, 22, cut=False), "batch 2 of partition 0 is offsets 13-22, got 12-21"),
        (3, cut_update(3, 2, 14, 24, cut=False), "batch 2 of partition 0 is offsets 13-22, got 14-23"),
        (3, cut_update(3, 2, 13, 22, cut=True), "batch 3 of partition 0 is offsets 22-23, got 23-23"),
        (4, cut_update(4, 1, 10, 13, cut=True), "4 batches end at offset 23 by the checkpoint, and at 32 by the cuts"),
    ],
)
def test_batches_with_a_hole_an_overlap_or_another_length_are_named(at: int, update: Update, says: str) -> None:
    records = [*CUTS[:at], update, *CUTS[at + 1 :]]
    report = balance(durable=cut_model(), ends=(30, 0), records=records, dead_letters=[])
    assert any(says in line for line in report.violations()), report.violations()


def test_a_checkpoint_that_counts_other_cuts_than_the_updates_is_named() -> None:
    report = balance(durable=cut_model(15, 0), ends=(30, 0), records=CUTS, dead_letters=[])
    assert any("by the checkpoint" in line for line in report.violations())
