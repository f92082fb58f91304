"""Row updates of a table in shards, and of numpy in one process, in one run: `python -m benchmarks.sharded_rows`.

A shard is a process that decodes the blobs of contributions, and makes the optimizer's step with its rows, as a shard
of a parameter server does. `numpy` subtracts the same rows from an array. One row of one update counts as one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from doll.config import parse
from doll.optim.row_optimizer import row_optimizers
from doll.ps.tables.store import TableStore
from doll.storage.contributions import Compressor, decode_contribution
from doll.tables.row_slices import RowSlice
from doll.tables.rows import Ids, Rows, TableShape

from benchmarks.tables import Table as Report

WIDTH: Final = 16
NAME: Final = "rows"
OPTIMIZERS: Final = ("sgd", "adagrad", "adam")
JOB: Final = """
job: rows
task: {class: "examples.digits.task:Digits"}
training: {policy: {name: bsp}, optimizer: {name: %s, lr: 0.01}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=float, default=4e6)
    parser.add_argument("--update", type=int, default=20_000, help="rows of an update")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    shape = TableShape(int(arguments.rows), WIDTH)
    updates = _updates(shape.num_rows, arguments.update)
    runs: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.repetitions):
        runs.setdefault(("numpy", 1), []).append(_in_processes(1, lambda _: _plain(shape, updates), arguments.seconds))
        for optimizer in OPTIMIZERS:
            for shards in (1, 2):

                def make(number: int, optimizer: str = optimizer, shards: int = shards) -> Callable[[int], int]:
                    return _table(optimizer, shape, updates, RowSlice(number, shards))

                speed = _in_processes(shards, make, arguments.seconds)
                runs.setdefault((optimizer, shards), []).append(speed)
                print(optimizer, shards, f"{speed:,.0f}", flush=True)
    reference = statistics.median(runs["numpy", 1])
    report = Report(
        f"Row updates per second of a table of {shape.num_rows:.0e} rows of {WIDTH} values, medians of "
        f"{arguments.repetitions} runs in turns",
        ("what", "shards", "row updates/s", "lowest to highest", "share of numpy"),
    )
    for (what, shards), speeds in runs.items():
        median = statistics.median(speeds)
        spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
        report.rows.append([what, str(shards), f"{median:,.0f}", spread, f"{median / reference:.2f}"])
    print(report.markdown())


def _updates(num_rows: int, count: int) -> list[Rows]:
    rng = np.random.default_rng(1)
    updates = []
    for _ in range(60):
        ids: Ids = np.unique(rng.integers(0, num_rows, count))
        updates.append(Rows(ids, rng.normal(size=(len(ids), WIDTH)).astype(np.float32)))
    return updates


def _plain(shape: TableShape, updates: list[Rows]) -> Callable[[int], int]:
    table = np.zeros(shape, np.float32)
    table[:: 4096 // (4 * WIDTH)] = 1  # every page exists

    def step(number: int) -> int:
        rows = updates[number % len(updates)]
        table[rows.ids] -= np.float32(0.01) * rows.values
        return len(rows.ids)

    return step


def _table(optimizer: str, shape: TableShape, updates: list[Rows], part: RowSlice) -> Callable[[int], int]:
    config = parse(JOB % optimizer)
    shapes = {NAME: part.shape(shape)}
    values = np.zeros(shapes[NAME], np.float32)
    values[:: 4096 // (4 * WIDTH)] = 1
    tables = TableStore(
        {NAME: values}, row_optimizers(config.training, shapes), is_slice=part.shards > 1
    )  # fmt: skip
    encoder = Compressor("rows", 0, shapes)
    blobs = [
        b"".join(encoder.compress(np.empty(0, np.float32), version=0, rows={NAME: part.part(rows)})) for rows in updates
    ]

    def step(number: int) -> int:
        contribution = decode_contribution(blobs[number % len(blobs)], 0, job="rows", version=0, numel=0, tables=shapes)
        tables.add(contribution.rows)
        tables.apply(1.0, number + 1)
        return len(contribution.rows[NAME].ids)

    return step


def _in_processes(count: int, make: Callable[[int], Callable[[int], int]], seconds: float) -> float:
    """Return the number of rows per second of all processes together."""
    readers = []
    start_s = time.time() + 2.0 + 2.0 * count  # after all are made
    for number in range(count):
        reader, writer = os.pipe()
        if os.fork() == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                os.write(writer, json.dumps(_speed(make(number), start_s, seconds)).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        readers.append(reader)
    speeds = []
    for reader in readers:
        with os.fdopen(reader, "rb") as answer:
            speeds.append(json.loads(answer.read()))
        os.wait()
    return float(sum(speeds))


def _speed(step: Callable[[int], int], start_s: float, seconds: float) -> float:
    number = 0
    while time.time() < start_s:  # every row has its state before it is measured
        step(number)
        number += 1
    done, begun = 0, time.perf_counter()
    while time.perf_counter() < begun + seconds:
        done += step(number)
        number += 1
    return done / (time.perf_counter() - begun)


if __name__ == "__main__":
    main()
