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
    assert [item.key for item in overflow.take_due(False, 30, 1)] == [b"b"]
    assert overflow.take_due(False, 30, 9) == [entries[0]]
    assert [item.key for item in overflow.take_due(True, 30, 9)] == [b"c"]
    assert overflow.take_due(True, 30, 9) == []
    overflow.close()
    assert list(tmp_path.iterdir()) == []


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
