"""Differential checkpoints of tables at the server: bit-equal to whole ones, in random sequences of updates."""

from __future__ import annotations

from typing import Any

import doll.ps.tables.bounded_ids
import doll.storage.differences
import numpy as np
import pytest
from doll.optim.row_optimizer import LazyAdam, RowAdagrad, RowOptimizer, RowwiseAdagrad
from doll.ps.tables.bounded_table import BoundedTable
from doll.ps.tables.store import TableStore
from doll.storage.checkpoints import Checkpoint
from doll.tables.bounds import FirstRows, TableBounds, initial_rows
from doll.tables.rows import Rows, TableShape
from fuzzing import seeds
from memory_stores import MemoryCheckpointStore

pytestmark = pytest.mark.slow  # loads torch
NUM_ROWS, WIDTH, MAX_ROWS = 3000, 4, 600
INITIAL = initial_rows(0, "items", WIDTH, 0.1)


def tables_of(optimizer: RowOptimizer | None, min_count: int, ttl: int | None, *, first: bool) -> TableStore:
    values = np.random.default_rng(0).standard_normal((NUM_ROWS, WIDTH), np.float32)
    bounded = {}
    if optimizer is not None:
        bounds = TableBounds(MAX_ROWS, min_count, ttl, INITIAL)
        ids = np.arange(0, 80, 2)
        begun = FirstRows(ids, INITIAL.rows(ids) + 1, np.ones(len(ids), np.int64)) if first else None
        bounded["items"] = BoundedTable("items", TableShape(2**40, WIDTH), bounds, optimizer, begun)
    return TableStore({"embed": values}, None if optimizer is None else {"embed": optimizer}, bounded)


def update(rng: np.random.Generator, version: int, *stores: TableStore) -> None:
    pushes: dict[str, Rows] = {}
    for name, table in (("embed", NUM_ROWS), ("items", 2**40 if version % 3 else 400)):
        if name in stores[0].shapes and rng.random() < 0.9:
            ids = np.unique(rng.integers(0, table, int(rng.choice([1, 10, 300], p=[0.5, 0.4, 0.1]))))
            pushes[name] = Rows(ids, rng.standard_normal((len(ids), WIDTH), np.float32))
    for store in stores:
        store.add(pushes)
        store.apply(0.5, version)


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].shape == b[name].shape and a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes()
        for name in a
    )


@pytest.mark.parametrize("seed", seeds(15))
@pytest.mark.parametrize("optimizer", [None, LazyAdam(0.1), RowwiseAdagrad(0.1), RowAdagrad(0.1)])
def test_a_resumed_model_is_that_of_whole_checkpoints(
    optimizer: RowOptimizer | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doll.storage.differences, "MIN_BASE_BYTES", 0)
    monkeypatch.setattr(doll.ps.tables.bounded_ids, "_COUNTS_PER_ROW", 1 if seed % 2 else 8)
    rng = np.random.default_rng(seed)
    min_count, ttl = (1, 3)[seed % 2], (None, 12, 70)[seed % 3]
    kinds = set()
    differential, whole = MemoryCheckpointStore("j", keep=1000), MemoryCheckpointStore("j", keep=1000)
    store, term, version = tables_of(optimizer, min_count, ttl, first=seed % 4 == 0), 1, 0
    for _ in range(40):
        for _ in range(rng.integers(0, 5)):
            version += 1
            update(rng, version, store)
        taken = Checkpoint(
            job="j", fingerprint="f", term=term, version=version, state=b"", tensors=store.tensors(),
            changes=store.row_changes(),
        )  # fmt: skip
        if rng.random() < 0.5:  # the thread that saves is late
            version += 1
            update(rng, version, store)
        differential.save(taken)
        whole.save(Checkpoint(job="j", fingerprint="f", term=term, version=taken.version, state=b"", tensors={
            name: array.copy() for name, array in taken.tensors.items()}))  # fmt: skip
        kinds.add(differential.read_head(term, taken.version).base is None)
        del taken
        loaded, expected = differential.load_newest(None), whole.load_newest(None)
        assert loaded is not None
        assert expected is not None
        assert equal(dict(loaded.tensors), dict(expected.tensors))
        if rng.random() < 0.2:  # a restart
            term += 1
            version = loaded.version
            store, other = (tables_of(optimizer, min_count, ttl, first=False) for _ in range(2))
            store.load(loaded.tensors)
            other.load(expected.tensors)
            version += 1
            update(rng, version, store, other)
            assert equal(store.tensors(), other.tensors())
    assert kinds == {True, False}
    for term, version in differential.versions():
        a, b = (store._load(term, version, in_place) for store, in_place in ((differential, True), (whole, False)))
        assert equal(dict(a.tensors), dict(b.tensors))


def test_few_changed_rows_make_a_small_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doll.storage.differences, "MIN_BASE_BYTES", 0)
    store, rng = tables_of(RowwiseAdagrad(0.1), 1, None, first=False), np.random.default_rng(1)
    saved = MemoryCheckpointStore("j")
    for version, (embed, items) in enumerate([(NUM_ROWS, MAX_ROWS), (NUM_ROWS // 100, MAX_ROWS // 100)], 1):
        pushes = {
            name: Rows(np.sort(rng.choice(size, count, replace=False)), np.ones((count, WIDTH), np.float32))
            for name, size, count in (("embed", NUM_ROWS, embed), ("items", MAX_ROWS, items))
        }
        store.add(pushes)
        store.apply(1.0, version)
        tensors, changes = store.tensors(), store.row_changes()
        saved.save(Checkpoint(
            job="j", fingerprint="f", term=1, version=version, state=b"", tensors=tensors, changes=changes
        ))  # fmt: skip
    whole, difference = saved.stored()
    assert difference.size_bytes < 0.05 * whole.size_bytes
