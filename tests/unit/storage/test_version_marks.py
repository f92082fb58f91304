"""Aliases and pins, what may be one, and which checkpoints are kept."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from doll.errors import CheckpointError, ConfigError, VersionUnknownError
from doll.storage.checkpoints import resolve_version
from doll.storage.file_checkpoints import FileCheckpointStore
from doll.storage.version_marks import StoredVersion, VersionHistory, VersionMarks, decode_marks, encode_marks, obsolete

HOUR_S = 3600.0


def test_marks_are_what_was_written() -> None:
    marks = VersionMarks().with_alias("stable", 40).with_alias("canary-2", 90).with_pin(90).with_pin(7)
    assert decode_marks(encode_marks(marks), "here") == marks
    assert marks.marked == {7, 40, 90}
    assert marks.aliases_of(40) == ["stable"]
    assert b'"stable": 40' in encode_marks(marks)
    moved = marks.with_alias("stable", 90).without_pin(7)
    assert (moved.aliases_of(90), moved.pins) == (["canary-2", "stable"], (90,))
    assert moved.without_alias("stable").aliases == {"canary-2": 90}
    assert marks.only({40}) == VersionMarks({"stable": 40})


@pytest.mark.parametrize(
    "name",
    ["latest", "12", "v12", "", "-x", "Stable", "a b", "a/b", "../stable", "a.b", "ü", "a\n", "a" * 64, "s=1", "1st"],
)
def test_what_could_be_a_number_or_a_path_is_no_alias(name: str) -> None:
    with pytest.raises(ConfigError, match="expected an alias of a-z, 0-9, - and _ that begins with a letter"):
        VersionMarks().with_alias(name, 3)


def test_what_is_not_marked_cannot_be_unmarked() -> None:
    marks = VersionMarks({"stable": 3}, (4,))
    with pytest.raises(ConfigError, match="expected one of the aliases stable, got 'other'"):
        marks.without_alias("other")
    with pytest.raises(ConfigError, match="expected one of the pinned versions 4, got 3"):
        marks.without_pin(3)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "expected aliases and pins as doll versions writes them"),
        (b'{"schema": 1, "aliases": {"stable": -1}}', "expected aliases and pins"),
        (b'{"schema": 1, "pins": "x"}', "expected aliases and pins"),
        (b'{"schema": 3}', "expected schema 1 or 2, got 3"),
    ],
)
def test_a_damaged_file_is_refused_and_nothing_is_deleted(data: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        decode_marks(data, "here")
    (tmp_path / "marks.json").write_bytes(data)
    store = FileCheckpointStore(tmp_path, "j", keep=2)
    stored = [StoredVersion(1, version, 0.0, 1) for version in range(5)]
    assert store._obsolete(stored) == []
    (tmp_path / "marks.json").unlink()
    assert [item.version for item in store._obsolete(stored)] == [2, 1, 0]


def test_a_store_without_versions_says_so(tmp_path: Path) -> None:
    with pytest.raises(VersionUnknownError, match="no version is kept: nothing has been learned yet"):
        resolve_version(FileCheckpointStore(tmp_path, "j"), "latest")


def test_one_version_of_each_hour_is_kept_for_a_day() -> None:
    history = VersionHistory(HOUR_S, 24 * HOUR_S)
    held: list[StoredVersion] = []
    for step in range(1, 12 * 48 + 1):  # one each five minutes for two days
        now_s = step * 300.0
        held.append(StoredVersion(1, step, now_s, 1))
        gone = obsolete(held, {77}, keep=3, history=history, now_s=now_s)
        held = [item for item in held if item not in gone]
    versions = [item.version for item in held]
    assert versions[-3:] == [574, 575, 576]
    assert versions[0] == 77  # it has a mark
    hourly = held[1:-3]
    assert all(later.saved_s - item.saved_s == HOUR_S for item, later in pairwise(hourly))
    assert 22 <= len(hourly) <= 25
    assert now_s - hourly[0].saved_s <= 24 * HOUR_S


def test_without_a_history_the_newest_are_kept() -> None:
    held = [StoredVersion(1, version, 0.0, 1) for version in (10, 20, 30, 40)]
    gone = obsolete(held, {10}, keep=2, history=VersionHistory(), now_s=0.0)
    assert [item.version for item in gone] == [20]
