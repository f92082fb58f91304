"""A long history and then its topic, learned by a job to the end: the model says how often it has learned each row.

    python -m benchmarks.history_model [--rows 50000000] [--records 500000]

`doll up` reads a table of Parquet and then the topic that follows it, which has the last rows of the table once more.
The model counts rows (`benchmarks.counted_task`), so it is compared with the count of all rows and records; and `doll
audit` has to agree. For the rate of a history beside that of its topic see `benchmarks.history`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from doll.config import JobConfig, parse
from doll.kafka import topics
from doll.kafka.publisher import Publisher
from doll.local.stack import local_stack
from doll.services import Services
from safetensors.numpy import load_file

from benchmarks.counted_task import COUNTERS, counts_of

PARTITIONS: Final = 4
_ROWS_IN_FILE: Final = 2_000_000
_AT_ONCE: Final = 1_000_000
_OVERLAP_S: Final = 60
_IN_BOTH: Final = 20_000  # rows of the table that the topic has too
_BEFORE_S: Final = (20.0, 4e-6)  # for writing the table, and for each row: it ends when the topic begins


def job_of(folder: Path, topic: str, address: str, total: int) -> dict[str, Any]:
    return {
        "job": "history-model", "task": {"class": "benchmarks.counted_task:Counted"},
        "kafka": {"address": address, "replication_factor": 1},
        "source": {
            "kind": "history", "table": str(folder / "table"), "topic": topic, "time": "at",
            "columns": ["id", "at", "y"],
            "handover": {"key": "id", "overlap_s": _OVERLAP_S}, "limit_samples": total,
        },
        "data": {"workers": 2, "partitions": PARTITIONS, "batch_size": 10_000, "cut_after_s": 2},
        "training": {"policy": {"name": "ssp"}}, "evaluation": {"enabled": False}, "stop": {"samples": total},
    }  # fmt: skip


def write_table(folder: Path, rows: int, begin_ms: int) -> None:
    """Write rows with a millisecond between them."""
    folder.mkdir()
    for first in range(0, rows, _ROWS_IN_FILE):
        ids = np.arange(first, min(first + _ROWS_IN_FILE, rows))
        table = pa.table({"id": ids, "at": begin_ms + ids, "y": ids % 2})
        pq.write_table(table, folder / f"{first:012}.parquet", row_group_size=200_000)


def fill(config: JobConfig, services: Services, ids: range, begin_ms: int) -> None:
    with Publisher(config, services, queue_buffering_max_messages=1_000_000) as publisher:
        for at in ids:
            value = b'{"id":%d,"at":%d,"y":%d}' % (at, begin_ms + at, at % 2)
            while not publisher.try_send(config.topic("samples"), value, partition=at % PARTITIONS):
                publisher.poll(0.1)
        while len(publisher):
            publisher.poll(0.1)


def expected(total: int) -> np.ndarray[Any, Any]:
    counts = np.zeros((2, COUNTERS))
    for first in range(0, total, _AT_ONCE):
        counts += counts_of(np.arange(first, min(first + _AT_ONCE, total)))
    return counts


def doll(*words: str | Path) -> str:
    run = subprocess.run([sys.executable, "-m", "doll", *words], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"doll {words[0]} failed:\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")
    return run.stdout


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--records", type=int, default=500_000)
    options = parser.parse_args(argv)
    total = options.rows + options.records
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        end_s = time.time() + _BEFORE_S[0] + _BEFORE_S[1] * options.rows
        begin_ms = round(1000 * end_s) - options.rows
        write_table(folder / "table", options.rows, begin_ms)
        owner = parse(json.dumps({"job": "owner", "task": {"class": "a:B"}, "data": {"workers": PARTITIONS}}))
        with local_stack(owner, folder / "stack", lambda text: None) as stack:
            topics.ensure(owner, stack.services)
            topic = owner.topic("samples")  # any topic of these partitions will do
            time.sleep(max(0.0, end_s - time.time()))
            fill(owner, stack.services, range(options.rows - _IN_BOTH, total), begin_ms)
            (folder / "job.json").write_text(json.dumps(job_of(folder, topic, stack.services.kafka, total)))
            began_s = time.monotonic()
            doll("up", folder / "job.json", "--parent-folder", folder / "runs")
            took_s = time.monotonic() - began_s
            run_folder = next((folder / "runs").iterdir())
            doll("export", run_folder, "--out", folder / "model")
            (weights,) = load_file(folder / "model" / "model.safetensors").values()
            differ = int((weights != expected(total)).any(axis=0).sum())
            print(doll("audit", run_folder))
    print(
        f"{total:,} rows and records in {took_s:.0f} s ({total / took_s:,.0f}/s); "
        f"{differ} of {COUNTERS} counters differ"
    )
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
