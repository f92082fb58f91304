"""No record is sent twice and none is left out between a table and a topic: random plays of the pure core."""

from __future__ import annotations

import os
import random

import pytest
from doll.errors import ConfigError, RecordError
from doll.producers.handover import (
    FileMark,
    Overlap,
    Refused,
    Snapshot,
    State,
    begin_after,
    changed,
    decode,
    encode,
    find_gap,
    identity,
)

PLAYS = int(os.environ.get("DOLL_PLAYS", "3000"))


Records = list[tuple[int, int]]  # of a partition: arrival and identity, in order of arrival


def restarted(
    end_us: int, overlap_us: int, table: Records, topic: list[Records], begin: list[int], offsets: list[int],
    over: set[int],
) -> Overlap:  # fmt: skip
    """As `doll.producers.history` makes it again. `table`: event time and identity of each row."""
    since_us = Overlap.since_us(end_us, overlap_us)
    overlap = Overlap(end_us, overlap_us, (known for at, known in table if at >= since_us))
    early = [sum(arrival < since_us for arrival, _ in records) for records in topic]
    for first, until in ((early, begin), (begin, offsets)):
        for partition, records in enumerate(topic):
            for arrival, known in records[first[partition] : until[partition]]:
                if not overlap.is_open(partition, arrival):
                    break
                overlap.takes(known)
    overlap.over |= over
    return overlap


def test_each_record_counts_once_in_random_plays_with_restarts() -> None:
    """Records with equal keys and times; arrival up to the overlap after their time; restarts after any record."""
    rng = random.Random(0)
    for _ in range(PLAYS):
        overlap_us, partitions = rng.choice([1_000, 50_000, 400_000]), rng.randint(1, 4)
        topic: list[Records] = []
        events = []  # arrival, event time and identity
        for _partition in range(partitions):
            records = []
            for arrival in sorted(rng.randrange(1_000_000) for _ in range(rng.randrange(25))):
                at = arrival - rng.randint(0, overlap_us)
                records.append((arrival, at, identity(rng.randrange(3), at)))
            topic.append([(arrival, known) for arrival, _, known in records])
            events += records
        cut = rng.randrange(1_000_000)  # what arrived until here is in the table
        table = [(at, known) for arrival, at, known in events if arrival <= cut]
        if not table:
            continue
        end_us = max(at for at, _ in table)
        begin = [sum(arrival < end_us - overlap_us for arrival, _ in records) for records in topic]
        over: set[int] = set()
        offsets, sent = list(begin), [known for _, known in table]
        overlap = restarted(end_us, overlap_us, table, topic, begin, offsets, over)
        while left := [n for n in range(partitions) if offsets[n] < len(topic[n])]:
            partition = rng.choice(left)
            arrival, known = topic[partition][offsets[partition]]
            offsets[partition] += 1
            if not (overlap.is_open(partition, arrival) and overlap.takes(known)):
                sent.append(known)
            if rng.random() < 0.1:
                if rng.random() < 0.5:
                    over |= overlap.over
                overlap = restarted(end_us, overlap_us, table, topic, begin, offsets, over)
        assert sorted(sent) == sorted(known for _, _, known in events)


def test_the_topic_begins_after_the_last_offsets_of_the_table() -> None:
    bounds = [(0, 10), (3, 9), (0, 0)]
    assert begin_after({0: (0, 6, 5), 1: (4, 8, 5)}, bounds) == (7, 9, 0)
    with pytest.raises(ConfigError, match="some are twice"):
        begin_after({0: (0, 6, 8)}, bounds)
    with pytest.raises(ConfigError, match="partition 3, offset 0 is in the table"):
        begin_after({3: (0, 6, 5)}, bounds)
    with pytest.raises(ConfigError, match="is it another topic"):
        begin_after({1: (0, 9, 5)}, bounds)


def test_records_that_were_deleted_after_the_end_of_the_history_are_a_gap() -> None:
    assert find_gap((7, 9), [(7, 10), (3, 9)]) == ""
    assert "partition 1: the records 2 to 2" in find_gap((7, 2), [(0, 10), (3, 9)])
    assert find_gap((7, 9), [(6, 10), (0, 9)], by_time=True) == ""
    assert "some records" in find_gap((7, 9), [(7, 10), (0, 9)], by_time=True)
    assert find_gap((0,), [(0, 5)], by_time=True) == ""


def test_files_that_changed_are_named_and_further_files_do_not_count() -> None:
    files = (FileMark("a", 10, "x"), FileMark("b", 20, "y"))
    kept = Snapshot(0, files, 5, 1, "", (0,))
    assert changed(kept, (*files, FileMark("c", 1, "z"))) == ""
    assert changed(kept, files[:1]) == "file b was deleted since the history began"
    assert changed(kept, (files[0], FileMark("b", 20, "z"))) == "file b was written again since the history began"


def test_records_of_the_topic_are_read_as_they_were_written_and_others_are_refused() -> None:
    for record in (State(3, 1, 2, (4,), 5, 6, 7, (0,)), Refused(1, 2, "why"), Snapshot(0, (), 5, 1, "", (0,))):
        assert decode(encode(record)) == record
    for value in (None, b"", b"x", encode({"type": "other"}), encode({"type": "state", "rows": "x"})):
        with pytest.raises(RecordError, match="not a record"):
            decode(value)
