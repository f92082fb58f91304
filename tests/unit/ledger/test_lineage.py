"""Generations: what is of the run at hand, what is of an earlier one, and what is refused."""

from __future__ import annotations

import msgspec
import pytest
from doll.config import parse
from doll.errors import ConfigError
from doll.ledger.admission import ANY_TERM, admit, fold_lineage, refuse_earlier_run, refuse_later_run
from doll.ledger.lineage import GenerationFilter, Lineage, LineageChange
from doll.records.control import DeadLetter, Finished, TermStarted, Update, decode, encode
from doll.services import Services
from doll.storage.checkpoints import Checkpoint
from memory_stores import MemoryCheckpointStore
from record_builders import finished, term_started, update

CONFIG = parse("job: digits\ntask: {class: 'a:B'}\n")
SERVICES = Services("broker:9092", "")


# Two runs on the same topics; a server of the first one wakes up late.
LOG: list[TermStarted | Update | Finished] = [
    term_started(1, origins=(0,)), update(1, 1), term_started(2, resumed=1, origins=(0,)), update(2, 2), finished(2, 2),
    term_started(3, generation=3, origins=(8,)), update(2, 3), update(3, 1),
    term_started(5, generation=3, resumed=1, origins=(8,)), update(5, 2),
]  # fmt: skip


def test_each_generation_has_its_own_records() -> None:
    first, second = GenerationFilter(0), GenerationFilter(3)
    assert list(first.records(LOG)) == LOG[:5]
    assert first.next_generation == 3
    assert list(second.records(LOG)) == [LOG[5], *LOG[7:]]
    assert second.next_generation is None
    assert list(GenerationFilter(0).records(LOG[:5])) == LOG[:5]


def test_each_generation_has_its_own_dead_letters() -> None:
    def letter(term: int) -> DeadLetter:
        return DeadLetter(worker=0, partition=0, offset=1, reason="r", payload=b"", payload_bytes=0, term=term)

    letters = [letter(0), letter(2), letter(3), letter(5)]
    first, second = GenerationFilter(0), GenerationFilter(3)
    list(first.records(LOG))
    assert list(first.letters(letters)) == letters[:2]
    assert list(second.letters(letters)) == letters[2:]


def test_the_lineage_is_that_of_the_newest_server() -> None:
    lineage = Lineage()
    assert (lineage.newest_term, lineage.generation) == (0, 0)
    for record in LOG[:5]:
        lineage.feed(record)
    assert lineage == Lineage(2, 0, (0,), 2, "updates: 2 reached")
    assert [lineage.feed(record) for record in LOG[5:]] == [
        LineageChange.GENERATION, LineageChange.FENCED, LineageChange.NONE, LineageChange.TERM, LineageChange.NONE,
    ]  # fmt: skip
    assert lineage == Lineage(5, 3, (8,), 2, "")
    assert [lineage.is_current(term) for term in (2, 3, 5)] == [False, True, True]


def test_a_term_started_record_without_a_generation_is_of_the_first_one() -> None:
    data = encode(term_started(1))
    assert b"generation" not in data
    record = decode(data)
    assert isinstance(record, TermStarted)
    assert record.generation == 0


def test_records_of_another_schema_version_are_refused_and_bytes_that_are_no_record_are_skipped() -> None:
    values = [(at, encode(record)) for at, record in enumerate(LOG)]
    assert fold_lineage([*values, (10, b"rubbish"), (11, None)], "topic t", "digits") == Lineage(5, 3, (8,), 2, "")
    older = bytearray(values[0][1])
    older[1] = 1
    with pytest.raises(ConfigError, match=r"topic t holds records of another release of DOLL \(offset 7: expected .*"):
        fold_lineage([*values[:3], (7, bytes(older)), *values[3:]], "topic t", "digits")
    with pytest.raises(ConfigError, match="--set job=digits-2"):
        fold_lineage([(0, bytes(older))], "topic t", "digits")


def test_an_earlier_run_without_its_checkpoints_is_refused_with_three_ways_to_go() -> None:
    lineage = Lineage(2, 0, (0,), 120, "updates: 120 reached")
    with pytest.raises(ConfigError) as refusal:
        refuse_earlier_run(CONFIG, SERVICES, lineage, 0, "runs/digits/checkpoints")
    said = str(refusal.value)
    for words in (
        "broker:9092", "term 2, version 120, finished: updates: 120 reached", "runs/digits/checkpoints",
        "doll resume RUN", "--fresh", "data.start: earliest", "--set job=digits-2",
    ):  # fmt: skip
        assert words in said
    refuse_earlier_run(CONFIG, SERVICES, lineage, 2, "")
    refuse_earlier_run(CONFIG, SERVICES, lineage, ANY_TERM, "")
    refuse_earlier_run(CONFIG, SERVICES, Lineage(), 0, "")
    # Told of the run up to term 2; term 3 has begun since, and its checkpoints are lost.
    with pytest.raises(ConfigError):
        refuse_earlier_run(CONFIG, SERVICES, Lineage(3, 3), 2, "")


def test_checkpoints_of_an_earlier_run_than_the_newest_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a later run has begun on these topics: .* term 5, version 0, .*runs/old"):
        refuse_later_run(CONFIG, SERVICES, Lineage(5, 3), 0, "runs/old")
    # Brought back from a backup: terms were claimed since, but of the same run.
    refuse_later_run(CONFIG, SERVICES, Lineage(5, 3), 3, "")


def store_at(term: int, version: int) -> MemoryCheckpointStore:
    store = MemoryCheckpointStore("digits")
    counts = {"version": version, "applied": (version,) * 4, "origins": (0,) * 4, "records_per_batch": 64}
    state = msgspec.msgpack.encode(counts)
    store.save(Checkpoint(job="digits", fingerprint="f", term=term, version=version, state=state, tensors={}))
    return store


@pytest.mark.parametrize(
    ("term", "version", "says"),
    [
        (1, 2, ""),  # the store of which term 2 has begun
        (1, 1, ""),  # a backup of it, from before
        (1, 3, "gone on from version 2 (term 2), with other checkpoints than those in here, which are at version 3"),
        (2, 9, ""),  # of that server itself
    ],
)
def test_a_store_that_the_run_did_not_go_on_from_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, term: int, version: int, says: str
) -> None:
    """Two copies of a run folder whose Kafka is neither's own: what one has learned, the other must not learn again
    under the same numbers."""
    lineage = Lineage()
    for record in (term_started(1, origins=(0,)), update(1, 1), term_started(2, resumed=2, origins=(0,)), update(2, 3)):
        lineage.feed(record)
    monkeypatch.setattr("doll.ledger.admission.read_lineage", lambda *_, **__: lineage)
    if not says:
        assert admit(CONFIG, SERVICES, store_at(term, version), "here", 0) is lineage
        return
    with pytest.raises(ConfigError) as refused:
        admit(CONFIG, SERVICES, store_at(term, version), "here", 0)
    assert says in str(refused.value)


def test_a_server_that_begins_while_another_is_asked_is_none_of_an_earlier_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two standbys of a new job: one saves its first checkpoint and writes its first record between two looks of the
    other, which replaces it."""
    store = MemoryCheckpointStore("digits")
    lineage = Lineage()
    lineage.feed(term_started(1, origins=(0,) * 4))

    def read_meanwhile(*_: object, **__: object) -> Lineage:
        counts = {"version": 0, "applied": (0,) * 4, "origins": (0,) * 4, "records_per_batch": 64}
        state = msgspec.msgpack.encode(counts)
        store.save(Checkpoint(job="digits", fingerprint="f", term=1, version=0, state=state, tensors={}))
        return lineage

    monkeypatch.setattr("doll.ledger.admission.read_lineage", read_meanwhile)
    assert admit(CONFIG, SERVICES, store, "here", 0) is lineage
