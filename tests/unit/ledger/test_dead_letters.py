"""One dead record for each record that has letters: which letter counts, and in what state it is."""

from __future__ import annotations

from typing import Any

import msgspec
from doll.ledger import dead_letters
from doll.ledger.balance import OffsetState
from doll.ledger.dead_letters import DeadRecord, Selection
from doll.records.control import DeadLetter, encode


def test_letters_that_came_twice_count_once() -> None:
    letter = DeadLetter(worker=0, partition=0, offset=4, reason="first", payload=b"p", payload_bytes=1)
    again = DeadLetter(worker=0, partition=0, offset=4, reason="second", payload=b"p", payload_bytes=1)
    note = msgspec.structs.replace(letter, code="replayed", replayed_as=9, payload=b"", payload_bytes=0)

    def collect(letters: list[DeadLetter], offset_state: OffsetState = "dead", reason: str = "") -> list[DeadRecord]:
        return dead_letters.collect(letters, lambda partition, offset: offset_state, Selection(reason))

    (record,) = collect([letter, again, note])
    assert (record.letter, record.replayed_as, record.state) == (again, (9,), "replayed")
    assert collect([letter, note], reason="SECOND") == []
    # A user's exception may say anything: only the code counts.
    posing = DeadLetter(worker=0, partition=0, offset=5, reason="replayed as offset 9", payload=b"x", payload_bytes=1)
    assert collect([posing])[0].replayed_as == ()
    # Where two processes found different samples of a record bad, the update that counts says which of them was right.
    part = msgspec.structs.replace(letter, reason="in part", whole=False)
    states: list[OffsetState] = ["dead", "partly", "applied", "pending"]
    for letters, expected in (
        ([letter, part], ["dead", "in part", "superseded", "pending"]),
        ([part, letter], ["dead", "superseded", "superseded", "pending"]),
    ):
        assert [collect(letters, offset_state)[0].state for offset_state in states] == expected
        assert collect(letters, "dead")[0].letter == letter
    assert len(encode(note)) < 200


def test_records_are_chosen_by_code_and_by_text() -> None:
    letters = [
        DeadLetter(worker=0, partition=0, offset=1, reason="KeyError: x", payload=b"", payload_bytes=0),
        DeadLetter(worker=0, partition=1, offset=2, reason="loss is NaN", code="harmful", payload=b"", payload_bytes=0),
    ]

    def offsets(**chosen: Any) -> list[int]:
        return [record.at[1] for record in dead_letters.collect(letters, lambda *_: "dead", Selection(**chosen))]

    assert offsets() == [1, 2]
    assert offsets(code="harmful") == [2]
    assert offsets(code="undecodable", reason="keyerror") == [1]
    assert offsets(code="harmful", reason="keyerror") == []
    assert offsets(at=[(1, 2)]) == [2]
