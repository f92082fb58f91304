"""Entries beyond the memory: folders of processes that were killed do not stay."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from doll.join.entries import Entry
from doll.join.rocks_overflow import RocksOverflow, remove_leftovers
from doll.records.join_log import Routed


def entry(key: bytes, deadline_ms: int, features: Routed | None) -> Entry:
    return Entry(key, "waiting" if features is None else "open", deadline_ms, deadline_ms, 0, features, [], [])


def test_entries_come_back_by_key_and_by_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    overflow = RocksOverflow()
    assert list(tmp_path.iterdir()) == [], "no database without entries"
    shown = Routed(0, 0, 0, 5, b"a", b"{")
    entries = [entry(b"a", 30, shown), entry(b"b", 10, shown), entry(b"c", 20, None), entry(b"d", 20, shown)]
    overflow.put_all(entries)
    assert [item.key for item in overflow.take([b"d", b"x"])] == [b"d"]
    assert overflow.take_due(False, 9) == []
    assert overflow.take_due(False, 10) == [entries[1], entries[0]], "a block, with a later one"
    assert [item.key for item in overflow.take_due(True, 30)] == [b"c"]
    assert overflow.take_due(True, 30) == []
    overflow.close()
    assert list(tmp_path.iterdir()) == []


def test_an_entry_that_comes_again_is_the_newest_one_at_any_of_its_deadlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("doll.join.rocks_overflow._BLOCK_KEYS", 2)
    shown, overflow = Routed(0, 0, 0, 5, b"a", b"{"), RocksOverflow()
    entries = [entry(b"k%d" % number, 10 * number, shown) for number in range(5)]
    overflow.put_all(entries)
    (again,) = overflow.take([b"k1"])
    assert (overflow.take([b"k1"]), again) == ([], entries[1])
    again.deadline_ms, again.labels = 70, [shown]
    overflow.put_all([again])
    assert overflow.take_due(False, 15) == [entries[0], again], "by its first deadline"
    assert overflow.take([b"k2"]) == [entries[2]]
    assert overflow.take([b"k3"]) == [entries[3]]
    overflow.put_all([entries[2]])
    assert overflow.take_due(False, 60) == [entries[2]]
    assert overflow.take_due(False, 60) == [entries[4]]
    assert overflow.take_due(False, 100) == [], "the blocks of entries that were taken"
    overflow.close()


def test_folders_of_processes_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    live = tmp_path / f"doll-join-{os.getppid()}-c"
    for folder in (tmp_path / f"doll-join-{ended.pid}-a", tmp_path / f"doll-join-{os.getpid()}-b", live):
        folder.mkdir()
    (tmp_path / "doll-join-notes").mkdir()
    remove_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([live.name, "doll-join-notes"])
