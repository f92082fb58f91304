"""The balance on random histories of a job: sound ones balance, and each kind of damage is noticed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from doll.ledger import offset_ranges
from doll.ledger.balance import LedgerReport, Range
from doll.ledger.second_audit import SecondReport, balanced, compared
from doll.ledger.valid_updates import DurableModel
from doll.records.chain import chained
from doll.records.control import DeadLetter, Finished, Member, TermStarted, Update, encode
from fuzzing import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from record_builders import balance, dead_letter


@dataclass
class History:
    """What a job left behind: the arguments of `balance`, and what the truth is."""

    durable: DurableModel
    ends: list[int]
    records: list[TermStarted | Update | Finished]
    letters: list[DeadLetter]
    truth: Counter[str] = field(default_factory=Counter)
    voided: int = 0

    def report(self, **changes: Any) -> LedgerReport:
        return balance(
            **{
                "durable": self.durable,
                "ends": self.ends,
                "records": self.records,
                "dead_letters": self.letters,
                **changes,
            }
        )

    def durable_updates(self) -> list[int]:
        """Positions in `records` of the updates that the durable model contains, by version."""
        at: dict[int, int] = {}
        newest = 0
        for position, record in enumerate(self.records):
            if record.term < newest:
                continue
            newest = record.term
            if isinstance(record, TermStarted):
                at = {version: where for version, where in at.items() if version <= record.resumed_version}
            elif isinstance(record, Update):
                at[record.version] = position
        return [where for version, where in sorted(at.items()) if version <= self.durable.version]


def play(rng: random.Random, *, steps: int, num: int = 3, rpb: int = 4, save_at_end: bool = False) -> History:
    """A sound history: groups are applied, saved, lost in crashes and done again; fenced servers still write; some
    partitions are added, which a later server knows only of a checkpoint."""
    origins = tuple(rng.choice([0, 0, 17]) for _ in range(num))
    ends = [origin + rng.randint(0, rpb * steps) for origin in origins]
    fate: dict[tuple[int, int], str] = {}  # what becomes of each offset, the same whoever reads it
    for n in range(num):
        for offset in range(origins[n], ends[n]):
            fate[n, offset] = rng.choices(["good", "dead", "gap", "held out"], [12, 1, 1, 1])[0]
    records: list[TermStarted | Update | Finished] = []
    letters: list[DeadLetter] = []

    def batch(worker: int, number: int, version: int) -> Member:
        lo = origins[worker] + number * rpb
        span = range(lo, lo + rpb)
        dead = tuple(offset for offset in span if fate[worker, offset] == "dead")
        gaps = tuple(offset_ranges.points(offset for offset in span if fate[worker, offset] == "gap"))
        held_out = tuple(offset for offset in span if fate[worker, offset] == "held out")
        letters.extend(dead_letter(worker, offset) for offset in dead)
        if rng.random() < 0.1:
            letters.append(dead_letter(worker, lo, whole=False))
        good = sum(fate[worker, offset] == "good" for offset in span)
        return Member(
            worker=worker,
            partition=worker,
            batch=number,
            lo=lo,
            hi=lo + rpb,
            n_samples=good,
            base_version=version - 1,
            dead=dead,
            gaps=gaps,
            held_out=held_out,
        )

    term, voided = 1, 0
    saved_term, saved_version, saved_applied = 1, 0, [0] * num  # a server saves version 0 before it writes anything
    version, applied, known = 0, [0] * num, rng.randint(1, num)
    saved_known = known
    zombies: list[tuple[int, int, list[int]]] = []
    records.append(TermStarted(term=1, resumed_version=0, origins=origins[:known], records_per_batch=rpb, time_s=0.0))

    def update(by: int, number: int, counts: list[int]) -> Update | None:
        ready = [n for n in range(known) if origins[n] + (counts[n] + 1) * rpb <= ends[n]]
        if not ready:
            return None
        members = []
        for n in rng.choices(ready, k=rng.randint(1, 4)):
            if origins[n] + (counts[n] + 1) * rpb <= ends[n]:
                members.append(batch(n, counts[n], number))
                counts[n] += 1
        rng.shuffle(members)  # the order within a group is nobody's business
        samples = sum(member.n_samples for member in members)
        return Update(term=by, version=number, members=tuple(members), n_samples=samples, loss=1.0)

    for _ in range(steps):
        action = rng.choices(["update", "save", "crash", "zombie", "grow"], [12, 4, 1, 1, 1])[0]
        if action == "update":
            done = update(term, version + 1, applied)
            if done is not None:
                version += 1
                records.append(done)
        elif action == "save":
            saved_term, saved_version, saved_applied, saved_known = term, version, list(applied), known
        elif action == "grow":
            known = min(known + 1, num)
        elif action == "crash":
            zombies.append((term, version, list(applied)))
            voided += version - saved_version
            term += rng.randint(1, 2)  # one that died before it wrote anything may lie between
            version, applied, known = saved_version, list(saved_applied), saved_known
            records.append(
                TermStarted(
                    term=term, resumed_version=version, origins=origins[:known], records_per_batch=rpb, time_s=0.0
                )
            )  # fmt: skip
        elif zombies:
            old_term, old_version, old_applied = zombies.pop()
            done = update(old_term, old_version + 1, old_applied)
            if done is not None:
                voided += 1
                records.append(done)
    if save_at_end:
        saved_term, saved_version, saved_applied = term, version, list(applied)
        records.append(Finished(term=term, version=version, reason="end", time_s=0.0))
    durable = DurableModel(
        term=saved_term,
        version=saved_version,
        applied=tuple(saved_applied),
        origins=origins,
        records_per_batch=rpb,
    )
    truth: Counter[str] = Counter()
    for (n, offset), what in fate.items():
        truth[what if offset < origins[n] + saved_applied[n] * rpb else "pending"] += 1
    return History(durable, ends, records, letters, truth, voided)


RNG = st.integers(0, 2**32).map(random.Random)  # ten times faster than st.randoms


def counts(report: LedgerReport) -> dict[str, int]:
    return {
        "good": report.applied, "dead": report.dead, "gap": report.gaps, "held out": report.held_out,
        "pending": report.pending,
    }  # fmt: skip


@given(rng=RNG, steps=st.integers(0, 60), save_at_end=st.booleans())
@settings(max_examples=examples(300))
def test_every_sound_history_balances(rng: random.Random, steps: int, save_at_end: bool) -> None:
    history = play(rng, steps=steps, save_at_end=save_at_end)
    report = history.report()
    assert report.violations() == []
    assert report.ok
    assert {kind: n for kind, n in counts(report).items() if n} == dict(history.truth)
    assert report.produced == sum(history.truth.values())
    assert report.voided == history.voided
    assert (report.missing, report.twice) == ((), ())
    assert report.updates == history.durable.version


@given(rng=RNG)
def test_a_dropped_update_is_missing(rng: random.Random) -> None:
    history = play(rng, steps=60)
    assume(history.durable.version)
    where = rng.choice(history.durable_updates())
    dropped = history.records.pop(where)
    assert isinstance(dropped, Update)
    report = history.report()
    assert not report.ok
    assert covers(report.missing, dropped.members)
    assert f"versions {dropped.version} to {dropped.version} are in the durable model" in " ".join(report.violations())
    assert sum(counts(report).values()) + sum(r.hi - r.lo for r in report.missing) == report.produced


@given(rng=RNG)
def test_a_batch_in_two_updates_is_twice(rng: random.Random) -> None:
    history = play(rng, steps=60)
    positions = history.durable_updates()
    assume(len(positions) >= 2)
    first, second = rng.sample(positions, 2)
    again = history.records[first].members[0]  # type: ignore[union-attr]
    other = history.records[second]
    assert isinstance(other, Update)
    history.records[second] = msgspec.structs.replace(
        other, members=(*other.members, again), n_samples=other.n_samples + again.n_samples
    )
    report = history.report()
    assert not report.ok
    assert report.twice == (Range(again.worker, again.lo, again.hi),)
    assert f"applied twice: partition {again.worker}: {again.lo}-{again.hi - 1}" in report.violations()


@given(rng=RNG)
def test_a_batch_replaced_by_its_neighbour_is_missing_and_twice(rng: random.Random) -> None:
    """The counts all agree: only ranges tell."""
    history = play(rng, steps=60)
    members = [
        (at, k, member)
        for at in history.durable_updates()
        for k, member in enumerate(history.records[at].members)  # type: ignore[union-attr]
    ]
    pairs = [(a, b) for a in members for b in members if a[2].worker == b[2].worker and a[2].batch != b[2].batch]
    assume(pairs)
    (at, k, lost), (_, _, copied) = rng.choice(pairs)
    update = history.records[at]
    assert isinstance(update, Update)
    changed = [*update.members[:k], copied, *update.members[k + 1 :]]
    history.records[at] = msgspec.structs.replace(
        update, members=tuple(changed), n_samples=sum(member.n_samples for member in changed)
    )
    report = history.report()
    assert covers(report.missing, [lost])
    assert covers(report.twice, [copied])


@given(rng=RNG)
def test_a_lost_dead_letter_is_missing(rng: random.Random) -> None:
    history = play(rng, steps=60)
    dead = [
        (member.worker, offset)
        for at in history.durable_updates()
        for member in history.records[at].members  # type: ignore[union-attr]
        for offset in member.dead
    ]
    assume(dead)
    gone = rng.choice(dead)
    history.letters = [item for item in history.letters if (item.partition, item.offset) != gone or not item.whole]
    report = history.report()
    assert report.missing == (Range(gone[0], gone[1], gone[1] + 1),)
    assert f"there is no dead letter: partition {gone[0]}: {gone[1]}" in " ".join(report.violations())


@given(rng=RNG, by=st.sampled_from([-3, -1, 1, 2]))
def test_a_shifted_range_is_noticed(rng: random.Random, by: int) -> None:
    history = play(rng, steps=60)
    assume(history.durable.version)
    at = rng.choice(history.durable_updates())
    update = history.records[at]
    assert isinstance(update, Update)
    first = update.members[0]
    shifted = msgspec.structs.replace(first, lo=first.lo + by, hi=first.hi + by)
    history.records[at] = msgspec.structs.replace(update, members=(shifted, *update.members[1:]))
    report = history.report()
    assert not report.ok
    expected = f"batch {first.batch} of partition {first.worker} is offsets {first.lo}-{first.hi - 1}"
    assert expected in " ".join(report.violations())
    assert report.missing


@given(rng=RNG)
def test_the_letter_of_an_offset_that_was_applied_is_superseded(rng: random.Random) -> None:
    """The worker that refused it died before its batch was durable; its successor could decode it."""
    history = play(rng, steps=60)
    at = [n for n, applied in enumerate(history.durable.applied) if applied]
    assume(at)
    n = rng.choice(at)
    offset = history.durable.origins[n]
    member = next(
        m
        for at in history.durable_updates()
        for m in history.records[at].members  # type: ignore[union-attr]
        if (m.worker, m.batch) == (n, 0)
    )
    assume(
        offset not in member.dead
        and offset not in member.held_out
        and not offset_ranges.contains(offset_ranges.union(member.gaps), offset)
    )
    before = history.report()
    history.letters.append(dead_letter(n, offset))
    report = history.report()
    assert report.ok
    assert replace(report, superseded=0, partitions=()) == replace(before, partitions=())
    assert (report.superseded, report.partitions[n].superseded) == (1, 1)
    assert "dead-lettered, 1 dead letters superseded" in report.summary()


@given(rng=RNG, by=st.sampled_from([-1, 1]))
def test_a_wrong_count_in_the_checkpoint_is_noticed(rng: random.Random, by: int) -> None:
    history = play(rng, steps=60)
    n = rng.randrange(3)
    applied = list(history.durable.applied)
    applied[n] += by
    assume(applied[n] >= 0)
    report = history.report(durable=msgspec.structs.replace(history.durable, applied=tuple(applied)))
    assert not report.ok
    edge = history.durable.origins[n] + min(applied[n], history.durable.applied[n]) * 4
    assert f"partition {n}: {edge}-{edge + 3}" in " ".join(report.violations())


def covers(ranges: tuple[Range, ...], members: Any) -> bool:
    """Whether exactly the members' offsets are in `ranges`."""
    said = {(r.partition, offset) for r in ranges for offset in range(r.lo, r.hi)}
    meant = {(m.worker, offset) for m in members for offset in range(m.lo, m.hi)}
    return said == meant


# --- the second audit -------------------------------------------------------------------------------------------------


def linked(records: Sequence[TermStarted | Update | Finished]) -> list[TermStarted | Update | Finished]:
    """The records with the hashes that their servers would give them."""
    hashes: dict[int, dict[int, bytes]] = {}  # by term and version
    made: list[TermStarted | Update | Finished] = []
    for record in records:
        if isinstance(record, TermStarted):
            terms = [term for term, at in hashes.items() if term < record.term and record.resumed_version in at]
            before = hashes[max(terms)][record.resumed_version] if terms else b""
            hashes[record.term] = {record.resumed_version: before}
        elif isinstance(record, Update):
            record = chained(record, hashes[record.term].get(record.version - 1, b""))
            hashes[record.term][record.version] = record.chain
        made.append(record)
    return made


def second(history: History) -> SecondReport:
    updates = [record for record in history.records if isinstance(record, Update)]
    gaps = {
        n: offset_ranges.union(
            gap for update in updates for item in update.members if item.partition == n for gap in item.gaps
        )
        for n in range(len(history.ends))
    }  # fmt: skip

    def present(partition: int, lo: int, hi: int) -> list[int]:
        return [offset for offset in range(lo, hi) if not offset_ranges.contains(gaps[partition], offset)]

    return balanced(
        [encode(record) for record in linked(history.records)],
        [(letter.partition, letter.offset) for letter in history.letters if letter.whole],
        list(zip(history.durable.origins, history.ends, strict=True)), present, until=history.durable.version,
    )  # fmt: skip


@given(rng=RNG, steps=st.integers(0, 60), save_at_end=st.booleans())
@settings(max_examples=examples(300))
def test_the_second_audit_agrees(rng: random.Random, steps: int, save_at_end: bool) -> None:
    history = play(rng, steps=steps, save_at_end=save_at_end)
    report = compared(second(history), history.report())
    assert report.ok, report.problems
    assert report.text().startswith(f"independent audit: {history.durable.version} updates")


@given(rng=RNG, damage=st.sampled_from(["dropped", "again", "letter", "torn"]))
@settings(max_examples=examples(200))
def test_the_second_audit_notices_damage(rng: random.Random, damage: str) -> None:
    history = play(rng, steps=60)
    places = history.durable_updates()
    assume(len(places) > 1)
    sound = history.report()
    at, other = rng.sample(places, 2)
    update, twice = history.records[at], history.records[other]
    assert isinstance(update, Update)
    assert isinstance(twice, Update)
    match damage:
        case "dropped":
            del history.records[at]
        case "again":
            members = (*twice.members, update.members[0])
            history.records[other] = msgspec.structs.replace(twice, members=members)
        case "letter":
            dead = [(item.partition, offset) for item in update.members for offset in item.dead]
            assume(dead)
            history.letters = [letter for letter in history.letters if (letter.partition, letter.offset) != dead[0]]
        case "torn":
            report = balanced([b"\xd0\x0b\xff", None, b""], [], [(0, 5)], lambda *places: range(5), until=3)
            assert len(report.problems) == 3
            return
    report = compared(second(history), sound)
    assert not report.ok


@given(rng=RNG, damage=st.sampled_from(["loss", "order", "hash"]))
@settings(max_examples=examples(200))
def test_the_chain_shows_a_change_that_no_count_shows(rng: random.Random, damage: str) -> None:
    history = play(rng, steps=60)
    places = history.durable_updates()
    assume(len(places) > 1)
    records = linked(history.records)
    at = rng.choice(places[:-1])
    update = records[at]
    assert isinstance(update, Update)
    match damage:
        case "loss":
            records[at] = msgspec.structs.replace(update, loss=update.loss + 1)
        case "order":
            assume(len(update.members) > 1 and update.members[::-1] != update.members)
            records[at] = msgspec.structs.replace(update, members=update.members[::-1])
        case "hash":
            records[at] = msgspec.structs.replace(update, chain=bytes(16))
    report = balanced(
        [encode(record) for record in records], [(letter.partition, letter.offset) for letter in history.letters],
        list(zip(history.durable.origins, history.ends, strict=True)), lambda *places: (),
        until=history.durable.version,
    )  # fmt: skip
    assert any(f"update {update.version}: its hash does not fit" in problem for problem in report.problems)


def test_a_checkpoint_names_the_hash_of_its_last_update() -> None:
    history = play(random.Random(3), steps=60, save_at_end=True)
    records = linked(history.records)
    last = records[history.durable_updates()[-1]]
    assert isinstance(last, Update)
    durable = msgspec.structs.replace(history.durable, chain=last.chain)
    assert history.report(durable=durable, records=records).ok
    report = history.report(durable=msgspec.structs.replace(durable, chain=b"another"), records=records)
    assert any("the records of updates were changed" in problem for problem in report.problems)
