"""Records that are held out of the stream: a class of their own in the ledger, and decided again by the audit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from doll.config import parse
from doll.kafka.range_reader import RangeReader
from doll.ledger.audit import _holdout_problems
from doll.ledger.balance import Ledger, LedgerReport
from doll.ledger.valid_updates import DurableModel
from doll.records.control import Member, Update
from doll.task.holdout import Split
from fake_message import FakeMessage as Message
from record_builders import balance, dead_letter, term_started, update

JOB = 'job: j\ntask: {class: "a:B"}\nevaluation: {holdout: {share: 0.5}}'
DURABLE = DurableModel(term=1, version=2, applied=(2, 0), origins=(0, 0), records_per_batch=8)


def updates(*held_out: int, **more: Any) -> list[Any]:
    """Two updates of partition 0, the second of which names offsets."""
    second = update(1, 2, (0, 1))
    (member,) = second.members
    member = msgspec.structs.replace(member, held_out=held_out, n_samples=8 - len(held_out), **more)
    changed = msgspec.structs.replace(second, members=(member,), n_samples=member.n_samples)
    return [term_started(1), update(1, 1, (0, 0)), changed]


def report_of(*held_out: int, **more: Any) -> LedgerReport:
    letters = [dead_letter(0, offset) for offset in more.get("dead", ())]
    return balance(durable=DURABLE, ends=[20, 0], records=updates(*held_out, **more), dead_letters=letters)


def test_held_out_records_are_counted_and_not_applied() -> None:
    report = report_of(9, 12)
    assert report.ok
    assert (report.applied, report.held_out, report.pending, report.produced) == (14, 2, 4, 20)
    assert report.partitions[0].held_out == 2
    assert "14 applied exactly once, 2 held out, 4 not yet applied" in report.summary()
    assert "held out" not in report_of().summary()


@pytest.mark.parametrize(
    ("held_out", "more", "says"),
    [
        ((3,), {}, "names offsets outside itself"),
        ((9,), {"dead": (9,), "n_samples": 7}, "both held out and dead or without a record: partition 0: 9"),
        ((9,), {"gaps": ((8, 10),), "n_samples": 6}, "both held out and dead or without a record: partition 0: 9"),
    ],
)
def test_what_cannot_be_is_a_problem(held_out: tuple[int, ...], more: dict[str, Any], says: str) -> None:
    records = updates(*held_out)
    (member,) = records[-1].members
    member = msgspec.structs.replace(member, **more)
    records[-1] = msgspec.structs.replace(records[-1], members=(member,), n_samples=member.n_samples)
    letters = [dead_letter(0, offset) for offset in more.get("dead", ())]
    report = balance(durable=DURABLE, ends=[20, 0], records=records, dead_letters=letters)
    assert not report.ok
    assert says in " ".join(report.violations())


class Log(RangeReader):
    """A partition with a key for each offset."""

    def __init__(self, keys: list[bytes | None]) -> None:
        self.problems = ["before"]
        self._keys = keys
        self.read_from: list[int] = []

    def client_messages(self, topic: str, partition: int, lo: int, hi: int) -> Iterator[Any]:
        self.read_from.append(lo)
        if partition == 0:
            yield from (Message(self._keys[offset], at=offset) for offset in range(lo, hi))
        self.problems.append("a batch that cannot be read")


def problems(keys: list[bytes | None], *held_out: int, low: int = 0, **more: Any) -> list[str]:
    config = parse(JOB)
    split = Split.of_job(config)
    assert split is not None
    ledger, reader = Ledger(DURABLE, updates(*held_out, **more)), Log(keys)
    result = _holdout_problems(split, reader, "samples", ledger.report([20, 0]), ledger, [low, 0])
    assert reader.problems == ["before"]
    assert reader.read_from[0] == low
    return result


def test_the_audit_decides_again_which_records_are_held_out() -> None:
    config = parse(JOB)
    split = Split.of_job(config)
    assert split is not None
    names = [f"user {n}".encode() for n in range(40)]
    mask = split.held_out(0, range(40), [b"{}"] * 40, list(map(Message, names))).tolist()
    inside = next(name for name, is_in in zip(names, mask, strict=True) if is_in)
    outside = next(name for name, is_in in zip(names, mask, strict=True) if not is_in)
    keys: list[bytes | None] = [outside] * 16
    keys[9] = keys[12] = inside
    assert problems(keys, 9, 12) == []
    assert problems(keys, 9) == ["learned, but to be held out (evaluation.holdout): partition 0: 12"]
    assert problems(keys, 9, 12, 14) == ["held out, but to be learned (evaluation.holdout): partition 0: 14"]
    assert problems(keys, 9, low=13) == [], "what retention has deleted cannot be decided again"
    keys[12] = None
    assert problems(keys, 9, dead=(12,)) == [], "a dead record is neither"


def test_the_letter_of_a_record_that_was_held_out_later_is_superseded() -> None:
    report = balance(durable=DURABLE, ends=[20, 0], records=updates(9), dead_letters=[dead_letter(0, 9)])
    assert report.ok
    assert (report.held_out, report.superseded) == (1, 1)
    ledger = Ledger(DURABLE, updates(9))
    assert [ledger.offset_state(0, offset) for offset in (8, 9, 16)] == ["applied", "held out", "pending"]


def test_a_member_of_an_earlier_release_has_none() -> None:
    member = Member(worker=0, partition=0, batch=0, lo=0, hi=8, n_samples=8, base_version=0)
    assert member.held_out == ()
    assert Update(term=1, version=1, members=(member,), n_samples=8, loss=1.0).held_out_score is None
