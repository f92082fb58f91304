"""A bounded table under a flood of ids: `python -m benchmarks.bounded_table`, 10^8 distinct ids in a few minutes.

Each update names frequent ids beside ids that never come again, as a stream of hashed items does. What is measured is
the table at the parameter server alone: admission, eviction and the optimizer's step, without a broker or a model.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from doll.optim.row_optimizer import RowwiseAdagrad
from doll.ps.tables.bounded_table import BoundedTable
from doll.storage.checkpoints import Checkpoint, decode_checkpoint, encode_checkpoint
from doll.tables.bounds import TableBounds, initial_rows, mixed
from doll.tables.rows import Ids, Rows, TableShape

from benchmarks.tables import Table as Report

_SPACE: Final = 2**63 - 1
_ROWS_PRINTED: Final = 10


def main() -> None:
    arguments = _arguments()
    table = _table(arguments)
    frequent = _ids(np.arange(arguments.frequent))
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    values = rng.standard_normal((2 * arguments.rare, arguments.width), np.float32)
    report = Report("A bounded table", ("distinct ids", "rows", "evicted", "refused", "ids/s", "MB of memory"))
    num_updates = -(-arguments.ids // arguments.rare)
    seconds = 0.0
    for version in range(1, num_updates + 1):
        first = arguments.frequent + version * arguments.rare
        often = frequent[rng.integers(0, len(frequent), arguments.rare // 10)]
        ids = _sorted(np.concatenate([often, _ids(np.arange(first, first + arguments.rare))]))
        gradient = Rows(ids, values[: len(ids)])
        begun = time.perf_counter()
        table.add(gradient)
        table.apply(1.0, version)
        seconds += time.perf_counter() - begun
        if version % max(1, num_updates // _ROWS_PRINTED) == 0:
            totals = table.totals
            row = (
                f"{version * arguments.rare:.1e}", f"{totals.rows:,}", f"{totals.evicted:,}", f"{totals.refused:,}",
                f"{version * len(ids) / seconds:,.0f}", f"{_memory_mb():,.0f}",
            )  # fmt: skip
            report.rows.append(list(row))
            print(*row, sep="  ", flush=True)
    print(report.text())
    after = table.read(frequent)
    initial = initial_rows(0, "items", arguments.width, 0.05).rows(frequent)
    print(f"frequent ids that have a row: {np.mean((after.values != initial).any(axis=1)):.2%}")
    print(f"a restart goes on with the same: {_goes_on(arguments, table, num_updates)}")


def _ids(numbers: Ids) -> Ids:
    return (mixed(numbers.astype(np.uint64)) % np.uint64(_SPACE)).astype(np.int64)


def _sorted(ids: Ids) -> Ids:
    ids = np.sort(ids)
    return ids[np.diff(ids, prepend=-1) > 0]


def _table(arguments: argparse.Namespace) -> BoundedTable:
    bounds = TableBounds(arguments.max_rows, arguments.min_count, None, initial_rows(0, "items", arguments.width, 0.05))
    return BoundedTable("items", TableShape(_SPACE, arguments.width), bounds, RowwiseAdagrad(0.01))


def _goes_on(arguments: argparse.Namespace, table: BoundedTable, version: int) -> bool:
    """Whether a table from a checkpoint is this one, to the bit, after one update more."""
    checkpoint = Checkpoint(job="j", fingerprint="f", term=1, version=version, state=b"", tensors=table.tensors())
    restored = _table(arguments)
    restored.load(decode_checkpoint(b"".join(bytes(part) for part in encode_checkpoint(checkpoint))).tensors)
    ids = _sorted(_ids(np.arange(version, version + arguments.rare)))
    for each in (table, restored):
        each.add(Rows(ids, np.ones((len(ids), arguments.width), np.float32)))
        each.apply(1.0, version + 1)
    before, after = table.tensors(), restored.tensors()
    return table.totals == restored.totals and all(
        before[name].tobytes() == after[name].tobytes() for name in before.keys() | after.keys()
    )


def _memory_mb() -> float:
    """Of this process now, resident."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1e6


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=float, default=1e8, help="distinct ids")
    parser.add_argument("--rare", type=int, default=100_000, help="ids of an update that never come again")
    parser.add_argument("--frequent", type=int, default=20_000, help="ids that come again and again")
    parser.add_argument("--max-rows", type=int, default=1_000_000)
    parser.add_argument("--min-count", type=int, default=1)
    parser.add_argument("--width", type=int, default=16)
    arguments = parser.parse_args()
    arguments.ids = int(arguments.ids)
    return arguments


if __name__ == "__main__":
    main()
