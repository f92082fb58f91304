"""Differential checkpoints against whole ones: `python -m benchmarks.differential_checkpoints`.

Both are written to files, with fsync, from the same tables, in turn. `plain` has a row for each id, `bounded` is a
`doll.BoundedEmbedding`. Then the same model is read. With `--shards`, the plain table is divided, and the time is that
of all parts, one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doll.optim.row_optimizer import RowwiseAdagrad
from doll.ps.tables.bounded_table import BoundedTable
from doll.ps.tables.store import TableStore
from doll.storage.checkpoints import Checkpoint
from doll.storage.differences import BaseReference
from doll.storage.file_checkpoints import FileCheckpointStore
from doll.tables.bounds import TableBounds, initial_rows
from doll.tables.row_slices import row_slices
from doll.tables.rows import Ids, Rows, TableShape

from benchmarks.tables import Table as Report

SHARES = (0.0001, 0.001, 0.01, 0.05, 0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=float, default=2e6)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = (
        "table", "changed rows", "whole MB", "difference MB", "share", "hold ms", "save whole s", "save difference s",
        "load whole s", "load difference s",
    )  # fmt: skip
    report = Report("Checkpoints of a table", columns, left=("table",))
    for kind in ("plain", "bounded") if arguments.shards == 1 else ("plain",):
        for share in SHARES:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                rows, width, shards = int(arguments.rows), arguments.width, arguments.shards
                report.rows.append(_measured(kind, rows, width, share, Path(folder), shards))
            print(*report.rows[-1], sep="  ", flush=True)
    print(report.text())
    print(report.markdown())


def _measured(kind: str, num_rows: int, width: int, share: float, folder: Path, shards: int) -> list[str]:
    slices, rng = row_slices(shards), np.random.default_rng(1)
    tables = [_tables(kind, part.shape(TableShape(num_rows, width)).num_rows, width) for part in slices]
    differential, whole = (FileCheckpointStore(folder / name, "j") for name in ("differential", "whole"))

    def change(rows: Ids, version: int) -> None:
        for of_shard, part in zip(tables, slices, strict=True):
            update(of_shard, part.numbers(rows), width, version)

    change(np.arange(num_rows), 1)
    bases = _save(differential, [_checkpoint(each, 1) for each in tables])
    count = int(share * num_rows)
    for version in range(2, 6):  # in updates, as between two checkpoints
        change(np.sort(rng.choice(num_rows, count // 4, replace=False)), version)
    begun = time.perf_counter()
    taken = [_checkpoint(each, 5) for each in tables]
    hold_s = time.perf_counter() - begun
    difference_s = _seconds(lambda: _save(differential, taken, bases))
    whole_s = _seconds(lambda: _save(whole, [dataclasses.replace(each, changes=None) for each in taken]))
    load_difference_s, load_whole_s = (
        _seconds(functools.partial(store.load_newest, None)) for store in (differential, whole)
    )
    sizes = [
        item.size_bytes + sum(part.size_bytes for part in store.read_head(*item.key).parts)
        for store in (whole, differential)
        for item in store.stored()[-1:]
    ]
    return [
        kind, f"{share:.2%}", f"{sizes[0] / 1e6:,.1f}", f"{sizes[1] / 1e6:,.2f}", f"{sizes[1] / sizes[0]:.2%}",
        f"{1e3 * hold_s:.1f}", f"{whole_s:.2f}", f"{difference_s:.3f}", f"{load_whole_s:.2f}",
        f"{load_difference_s:.2f}",
    ]  # fmt: skip


def _tables(kind: str, num_rows: int, width: int) -> TableStore:
    optimizer = RowwiseAdagrad(0.01)
    if kind == "plain":
        return TableStore({"items": np.zeros((num_rows, width), np.float32)}, {"items": optimizer})
    bounds = TableBounds(num_rows, 1, None, initial_rows(0, "items", width, 0.05))
    return TableStore({}, {}, {"items": BoundedTable("items", TableShape(2**40, width), bounds, optimizer)})


def update(tables: TableStore, ids: Ids, width: int, version: int) -> None:
    """Change these rows."""
    tables.add({"items": Rows(ids, np.ones((len(ids), width), np.float32))})
    tables.apply(1.0, version)


def _save(
    store: FileCheckpointStore, taken: Sequence[Checkpoint], bases: Sequence[BaseReference | None] = ()
) -> list[BaseReference]:
    """Save a checkpoint, or the parts of all shards and the checkpoint that names them. Return references to these."""
    if len(taken) == 1:
        store.save(taken[0])
        return []
    parts = tuple(
        store.save_part(dataclasses.replace(each, row_slices_of=("items",)), number, len(taken), base)
        for number, (each, base) in enumerate(zip_longest(taken, bases))
    )
    store.save(dataclasses.replace(taken[0], tensors={}, parts=parts, changes=None))
    return [BaseReference(taken[0].version, part.checksum) for part in parts]


def _checkpoint(tables: TableStore, version: int) -> Checkpoint:
    return Checkpoint(
        job="j", fingerprint="f", term=1, version=version, state=b"", tensors=tables.tensors(),
        changes=tables.row_changes(),
    )  # fmt: skip


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
