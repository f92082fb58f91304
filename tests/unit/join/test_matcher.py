"""The pure core of `doll join`: random plays, with restarts at any pack, against a join of all records at once.

`DOLL_PLAYS=10000` tries so many.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from typing import Any, NamedTuple

import pytest
from doll.config.join import JoinConfig
from doll.join.entries import Entries
from doll.join.matcher import Decisions, Matcher
from doll.join.rocks_overflow import RocksOverflow
from doll.records.join_log import FEATURES, Pack, Progress, Routed, parse_restart
from fuzzing import examples

PLAYS = int(os.environ.get("DOLL_PLAYS", "0")) or examples(300)


class Play(NamedTuple):
    """A job, and the packs of one partition of its log, by offset."""

    config: JoinConfig
    partitions: dict[int, int]
    packs: list[tuple[int, Pack]]


def join_of(labels: int = 1, **more: Any) -> JoinConfig:
    named = [{"topic": f"l{at}", "name": f"y{at}"} for at in range(labels)]
    return JoinConfig.model_validate({"features": {"topic": "f"}, "labels": named, "window_s": 5.0, **more})


def random_play(rng: random.Random) -> Play:
    """Few keys, late and early records, watermarks that stand still: everything meets everything."""
    takes = [rng.choice(["first", "first", "last", "sum", "list"]) for _ in range(rng.choice([1, 1, 2]))]
    early_s, on_late = rng.choice([None, None, rng.uniform(0.3, 3)]), rng.choice(["dead-letter", "correct"])
    config = JoinConfig.model_validate({
        "features": {"topic": "f"}, "window_s": rng.uniform(3.1, 8), "lateness_s": rng.uniform(0.01, 3),
        "labels": [
            {"topic": f"l{at}", "name": f"y{at}", "take": take, "retract": rng.choice([False, True])}
            for at, take in enumerate(takes)
        ],
        "on_close": rng.choice(["negative", {"value": None}] + ([] if early_s else ["drop"])),
        "on_late": on_late, "confirm": early_s is not None and rng.random() < 0.5, "early_after_s": early_s,
        "late_window_s": rng.choice([None, 2.0]) if on_late == "correct" else None,
    })  # fmt: skip
    partitions = {FEATURES: rng.randint(1, 3), **{at + 1: rng.randint(1, 2) for at in range(len(takes))}}
    now_ms, packs = 1_000_000, []
    offsets: Counter[tuple[int, int]] = Counter()
    marks: dict[tuple[int, int], int] = {}
    for number in range(rng.randint(3, 60)):
        now_ms += rng.randint(0, 1500)
        records = []
        for _ in range(rng.randint(0, 6)):
            source = rng.choice(list(partitions))
            where = source, rng.randrange(partitions[source])
            time_ms = now_ms - rng.randint(0, rng.choice([100, 3000, 12000]))
            value = b'{"x":%d,' % rng.randint(0, 9) if source == FEATURES else rng.choice([b"1", b"1", b"2", b""])
            key = b"k%d" % rng.randint(0, 12)
            records.append(Routed(*where, offsets[where], time_ms, key, value))
            offsets[where] += rng.choice([1, 1, 2])
            marks[where] = max(marks.get(where, 0), time_ms)
        progress = []
        for where in [(source, at) for source, count in partitions.items() for at in range(count)]:
            if rng.random() < 0.35:
                marks[where] = max(marks.get(where, 0), now_ms - rng.randint(0, 500))
            if where in marks and rng.random() < 0.7:
                progress.append(Progress(*where, offsets[where], marks[where]))
        packs.append((2 * number, Pack(now_ms, records, progress)))
    return Play(config, partitions, packs)


def new_matcher(play: Play, *, spills: bool = False) -> Matcher:
    entries = Entries(2000 if spills else 1 << 30, RocksOverflow())
    return Matcher(play.config, play.partitions, entries)


def joined(play: Play, rng: random.Random | None = None, *, spills: bool = False) -> tuple[list[Decisions], int]:
    """What follows from each pack, and the open keys at the end; with `rng`, a third of the packs is followed by a
    restart."""
    matcher = new_matcher(play, spills=spills)
    journal: list[Decisions] = []
    for offset, pack in play.packs:
        out = Decisions()
        matcher.feed(pack, offset, len(journal), out)
        journal.append(out)
        if rng is not None and rng.random() < 0.3:
            restart = parse_restart(matcher.restart(offset + 1, len(journal)).text())
            matcher.close()
            matcher = new_matcher(play, spills=spills)
            log = [item for item in play.packs if restart.offset <= item[0] <= offset]
            matcher.restore(restart, log, journal[restart.journal :])
    count = len(matcher)
    matcher.close()
    return journal, count


@pytest.mark.parametrize("seed", range(PLAYS))
def test_a_matcher_that_begins_again_decides_the_same(seed: int) -> None:
    play = random_play(random.Random(seed))
    expected, count = joined(play)
    got, open_keys = joined(play, random.Random(seed), spills=seed % 10 == 0)
    for step, again in zip(expected, got, strict=True):
        assert (step.samples, step.dropped, step.refused) == (again.samples, again.dropped, again.refused)
        assert sorted(step.settled) == sorted(again.settled)
    assert count == open_keys


@pytest.mark.parametrize("seed", range(PLAYS))
def test_each_record_counts_once(seed: int) -> None:
    """Features: in one first sample, dropped, refused or open. Labels: new in one sample, refused or open."""
    play = random_play(random.Random(seed))
    steps, _ = joined(play)
    records = {(item.source, item.partition, item.offset) for _, pack in play.packs for item in pack.records}
    firsts = [item.features for step in steps for item in step.samples if not item.is_correction]
    labels = [label for step in steps for item in step.samples for label in item.labels]
    refused = [item.record for step in steps for item in step.refused]
    dropped = [item for step in steps for item in step.dropped]
    said = [(item.source, item.partition, item.offset) for item in (*firsts, *labels, *refused, *dropped)]
    assert len(said) == len(set(said))
    assert set(said) <= records
    assert all(json.loads(item.value) for step in steps for item in step.samples)


@pytest.mark.parametrize("seed", range(examples(100)))
def test_the_samples_are_those_of_an_offline_join(seed: int) -> None:
    """Unique keys, one label each at most, in time and in any order of arrival; then all windows close."""
    rng, config = random.Random(seed), join_of(lateness_s=2.0)
    features, labels = {}, {}
    events: list[tuple[int, Routed]] = []
    for number in range(rng.randint(1, 200)):
        key, time_ms = b"k%d" % number, 1_000_000 + rng.randint(0, 30_000)
        features[key] = Routed(FEATURES, 0, number, time_ms, key, b'{"x":1,')
        events.append((time_ms + rng.randint(0, 1900), features[key]))
        if rng.random() < 0.6:
            label_ms = time_ms + rng.randint(-1000, 5000)
            labels[key] = Routed(1, 0, number, label_ms, key, b"1")
            events.append((label_ms + rng.randint(0, 1900), labels[key]))
    events.sort(key=lambda item: (item[0], item[1].source, item[1].offset))
    packs, at = [], 0
    while at < len(events):
        part = events[at : at + rng.randint(1, 20)]
        at += len(part)
        read_ms = part[-1][0] - 1900
        packs.append((at, Pack(part[-1][0], [item for _, item in part], [Progress(s, 0, at, read_ms) for s in (0, 1)])))
    packs.append((at + 1, Pack(10**7, [], [Progress(source, 0, at, 10**7) for source in (0, 1)])))
    steps, open_keys = joined(Play(config, {0: 1, 1: 1}, packs))
    got = {item.features.key: json.loads(item.value)["y0"] for step in steps for item in step.samples}
    assert got == {key: int(key in labels) for key in features}
    assert open_keys == 0
    assert not [item for step in steps for item in step.refused]


# --- cases -----------------------------------------------------------------------------------------------------------

T0 = 1_000_000


def shown(key: bytes, time_ms: int = T0, offset: int = 0) -> Routed:
    return Routed(FEATURES, 0, offset, time_ms, key, b'{"x":1,')


def label(key: bytes, time_ms: int, value: bytes = b"1", offset: int = 0) -> Routed:
    return Routed(1, 0, offset, time_ms, key, value)


def until(time_ms: int) -> Pack:
    """Nothing came, and everything has been read up to this event time."""
    return Pack(time_ms, [], [Progress(FEATURES, 0, 0, time_ms), Progress(1, 0, 0, time_ms)])


def decided(config: JoinConfig, *packs: Pack | list[Routed]) -> list[Decisions]:
    made = [pack if isinstance(pack, Pack) else Pack(T0, pack, []) for pack in packs]
    return joined(Play(config, {0: 1, 1: 1}, list(enumerate(made))))[0]


def labels_of(steps: list[Decisions]) -> list[tuple[Any, bool, Any, float]]:
    """Label, whether it is a correction, first label and age of each sample."""
    samples = [json.loads(item.value) for step in steps for item in step.samples]
    names = ("y0", "doll_is_correction", "doll_replaced_label", "doll_label_age_s")
    return [tuple(sample[name] for name in names) for sample in samples]


def test_a_label_makes_its_sample_at_once() -> None:
    steps = decided(join_of(), [shown(b"a")], [label(b"a", T0 + 1500)])
    assert labels_of(steps) == [(1, False, None, 1.5)]
    assert json.loads(steps[1].samples[0].value) == {
        "x": 1, "y0": 1, "doll_label_age_s": 1.5, "doll_is_correction": False, "doll_replaced_label": None,
        "doll_features": "0@0", "doll_labels": ["y0:0@0"],
    }  # fmt: skip


def test_an_early_sample_is_corrected_when_its_label_comes() -> None:
    steps = decided(
        join_of(early_after_s=1.0), [shown(b"a"), shown(b"b", offset=1)], until(T0 + 1500), [label(b"a", T0 + 3000)]
    )
    assert labels_of(steps) == [(0, False, None, 1.0), (0, False, None, 1.0), (1, True, 0, 3.0)]


def test_an_early_sample_is_confirmed_when_its_window_closes() -> None:
    config = join_of(early_after_s=1.0, confirm=True)
    steps = decided(config, [shown(b"a")], until(T0 + 1500), until(T0 + 16_000))
    assert labels_of(steps) == [(0, False, None, 1.0), (0, True, 0, 5.0)]


def test_a_label_that_comes_and_is_taken_back_replaces_twice() -> None:
    label_of = {"topic": "l", "name": "y0", "take": "last", "retract": True}
    config = JoinConfig.model_validate(
        {"features": {"topic": "f"}, "labels": [label_of], "window_s": 5.0, "early_after_s": 1.0}
    )
    later = [label(b"a", T0 + 2000), label(b"a", T0 + 3000, b"", offset=1)]
    steps = decided(config, [shown(b"a")], until(T0 + 1500), later)
    assert labels_of(steps) == [(0, False, None, 1.0), (1, True, 0, 2.0), (0, True, 1, 3.0)]


def test_a_label_that_is_taken_back_corrects_the_sample() -> None:
    config = JoinConfig.model_validate(
        {"features": {"topic": "f"}, "labels": [{"topic": "l", "name": "y0", "retract": True}], "window_s": 5.0}
    )
    steps = decided(config, [shown(b"a"), label(b"a", T0 + 1000), label(b"a", T0 + 2000, b"", offset=1)])
    assert labels_of(steps) == [(1, False, None, 1.0), (0, True, 1, 2.0)]


def test_a_late_label_is_refused_or_corrects() -> None:
    late: list[Pack | list[Routed]] = [[shown(b"a")], until(T0 + 16_000), [label(b"a", T0 + 9000)], until(T0 + 40_000)]
    assert [item.code for step in decided(join_of(), *late) for item in step.refused] == ["orphan"]
    assert labels_of(decided(join_of(on_late="correct"), *late)) == [(0, False, None, 5.0), (1, True, 0, 9.0)]


def test_windows_do_not_close_while_a_partition_has_not_been_read() -> None:
    silent = Pack(T0 + 10**6, [], [Progress(FEATURES, 0, 0, T0 + 10**6)])
    assert labels_of(decided(join_of(), [shown(b"a")], silent)) == []


def test_features_of_a_key_that_is_open_are_refused() -> None:
    steps = decided(join_of(), [shown(b"a"), shown(b"a", offset=1)])
    assert [(item.record.offset, item.code) for step in steps for item in step.refused] == [(1, "duplicate")]
    assert "partition 0, offset 0" in steps[0].refused[0].reason


def test_features_without_a_label_can_be_dropped() -> None:
    steps = decided(join_of(on_close="drop"), [shown(b"a")], until(T0 + 16_000))
    assert [[item.key for item in step.dropped] for step in steps] == [[], [b"a"]]


@pytest.mark.parametrize(("take", "expected"), [("last", 3), ("sum", 6.0), ("list", [1, 2, 3])])
def test_several_labels_of_a_key_are_collected_until_its_window_closes(take: str, expected: Any) -> None:
    config = JoinConfig.model_validate(
        {"features": {"topic": "f"}, "labels": [{"topic": "l", "name": "y0", "take": take}], "window_s": 5.0}
    )
    several = [label(b"a", T0 + 100 * at, b"%d" % at, offset=at) for at in (1, 2, 3)]
    steps = decided(config, [label(b"a", T0, b"", offset=9), shown(b"a"), *several], until(T0 + 16_000))
    assert [sample[0] for sample in labels_of(steps)] == [expected]


def test_the_state_of_a_restart_fits_into_the_metadata_of_an_offset() -> None:
    play = Play(join_of(), {0: 200, 1: 200}, [])
    matcher = new_matcher(play)
    progress = [Progress(s, p, 10**12 + 977 * p, 1_790_000_000_000 + 31 * p) for s in (0, 1) for p in range(200)]
    matcher.feed(Pack(T0, [], progress), 0, 0, Decisions())
    assert len(matcher.restart(1, 0).text()) < 4096


def test_a_text_that_is_no_restart_is_refused() -> None:
    for text in ("", "x", "%%%", parse_restart.__name__):
        with pytest.raises(ValueError, match="state of a join"):
            parse_restart(text)
