"""Which rows of tables differ between two versions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from doll.monitor.state import table_changes as module
from doll.monitor.state.table_changes import TableChange, table_changes


def bounded(ids: list[int], values: list[list[float]], name: str = "users") -> dict[str, Any]:
    return {f"table.{name}.ids": np.array(ids), f"table.{name}.values": np.array(values, np.float32)}


def plain(values: list[list[float]], name: str = "words") -> dict[str, Any]:
    return {f"table.{name}.values": np.array(values, np.float32), f"table.{name}.touched": np.zeros(0, np.int64)}


def test_rows_are_told_apart_by_their_ids_wherever_they_stand() -> None:
    a = bounded([7, -1, 3, 9, 20], [[1, 1], [5, 5], [2, 2], [3, 3], [0, 4]])
    b = bounded([3, 20, 7, 40, -1], [[2, 2], [0, 1.5], [1, 2], [9, 9], [1, 1]])
    assert table_changes(a, b) == {
        "users": TableChange(rows=3, changed=2, new=1, gone=1, largest=2.5, most=((20, 2.5), (7, 1.0)))
    }


def test_the_same_version_has_no_change() -> None:
    a = bounded([3, 1], [[1], [2]]) | plain([[1], [2]])
    nothing = TableChange(rows=2, changed=0, new=0, gone=0, largest=0.0, most=())
    assert table_changes(a, a) == {"users": nothing, "words": nothing}
    assert table_changes({"weights": np.zeros(3)}, {}) == {}


def test_tables_that_come_go_or_have_rows_of_another_width() -> None:
    a = plain([[1, 1], [2, 2]], "old") | plain([[1, 1]], "wider")
    b = plain([[0]], "fresh") | plain([[1, 1, 1], [2, 2, 2]], "wider")
    changes = table_changes(a, b)
    assert {name: (change.new, change.gone, change.rows) for name, change in changes.items()} == {
        "old": (0, 2, 0), "fresh": (1, 0, 0), "wider": (2, 1, 0),
    }  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_rows_that_moved_furthest_are_those_of_all_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    steps = np.array([0, 5, 1, 9, 2, 9, 4, 0, -7, 3], np.float32)
    a = {"table.t.values": np.zeros((10, 1), np.float32)}
    change = table_changes(a, {"table.t.values": steps[:, None]})["t"]
    assert change.changed == 8
    assert change.largest == 9
    assert change.most == ((3, 9.0), (5, 9.0), (8, 7.0), (1, 5.0), (6, 4.0))
