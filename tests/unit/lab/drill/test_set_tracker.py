"""What a drill counts of sets: how many were applied, and what was requeued and why."""

from __future__ import annotations

import msgspec
from record_builders import update
from statuses import server_status

from doll_lab.drill.report_lines import set_line
from doll_lab.drill.status_trackers import SetTracker


def test_it_counts_sets_by_their_batches() -> None:
    tracker = SetTracker()
    made = update(1, 1, (0, 0), (0, 1), (0, 2), (1, 0), (2, 0))
    members = tuple(
        msgspec.structs.replace(member, set_grant_id=number)
        for member, number in zip(made.members, (7, 7, 7, 10, 11), strict=True)
    )
    tracker.feed(msgspec.structs.replace(made, members=members))
    report = tracker.report()
    assert (report["applied"], report["applied_with_several_batches"], report["max_batches"]) == (3, 1, 3)


def test_counters_of_a_successor_continue_those_of_a_checkpoint() -> None:
    tracker = SetTracker()
    tracker.feed(server_status(term=1, counters={"requeued": 5, "requeued_rejoin": 5, "requeued_sets": 2}))
    tracker.feed(server_status(term=2, counters={"requeued": 4, "requeued_rejoin": 3, "requeued_blob_lost": 1}))
    report = tracker.report()
    assert (report["requeued_batches"], report["requeued_together"]) == (5, 2)
    assert report["requeued_by_cause"] == {"blob_lost": 1, "rejoin": 5}
    assert "5 (blob_lost 1, rejoin 5), 2 times several at once" in set_line(report)
