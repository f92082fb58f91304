"""The rate of a history, beside the rate of the topic that follows it: rows of Parquet, and the same records in Kafka.

    python -m benchmarks.history [--rows 1000000] [--runs 3]

`history`: the producer (`doll.producers.history`) sends a table of all rows but the last one. `topic`: the table has
one row, and the producer sends the other records from the topic. Both write the same number of samples to the samples
topic of a local Kafka, in transactions. Runs alternate; the medians count. The bar is 0.9 for history / topic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
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
from doll.producers.main import run_producer
from doll.services import Services

PARTITIONS: Final = 4
_FILES: Final = 4
_BAR: Final = 0.9


def job_of(name: str, table: Path, topic: str, rows: int) -> JobConfig:
    source = {
        "kind": "history", "table": str(table), "topic": topic, "time": "at", "columns": ["id", "at", "x", "y"],
        "handover": {"partition": "p", "offset": "o"}, "limit_samples": rows,
    }  # fmt: skip
    data = {"workers": PARTITIONS}
    return parse(json.dumps({"job": name, "task": {"class": "a:B"}, "data": data, "source": source}))


def columns_of(first: int, until: int) -> dict[str, Any]:
    ids = np.arange(first, until)
    at = 1_700_000_000_000 + ids
    return {"id": ids, "at": at, "x": ids * 0.25, "y": ids % 2, "p": ids % PARTITIONS, "o": ids // PARTITIONS}


def write_table(folder: Path, rows: int) -> None:
    folder.mkdir()
    for part in range(_FILES):
        columns = columns_of(part * rows // _FILES, (part + 1) * rows // _FILES)
        if len(columns["id"]):
            pq.write_table(pa.table(columns), folder / f"{part}.parquet", row_group_size=100_000)


def fill(config: JobConfig, services: Services, topic: str, rows: int) -> None:
    """Write the rows as records, in their partitions."""
    with Publisher(config, services, queue_buffering_max_messages=1_000_000) as publisher:
        for at in range(rows):
            value = json.dumps({"id": at, "at": 1_700_000_000_000 + at, "x": at * 0.25, "y": at % 2}).encode()
            while not publisher.try_send(topic, value, partition=at % PARTITIONS):
                publisher.poll(0.1)
        while len(publisher):
            publisher.poll(0.1)


def timed(config: JobConfig, services: Services, rows: int) -> tuple[float, float]:
    """Return samples/s by wall clock and by CPU time of this process."""
    topics.ensure(config, services)
    began_s, cpu_s = time.monotonic(), time.process_time()
    if run_producer(config, services, stop=threading.Event(), say=lambda text: None):
        raise RuntimeError("samples were not delivered")
    return rows / (time.monotonic() - began_s), rows / (time.process_time() - cpu_s)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(argv)
    rates: dict[str, list[tuple[float, float]]] = {"history": [], "topic": []}
    with tempfile.TemporaryDirectory() as name:
        folder, topic = Path(name), "benchmark-clicks"
        write_table(folder / "history", options.rows)
        write_table(folder / "topic", PARTITIONS)
        owner = parse(json.dumps({"job": "benchmark", "task": {"class": "a:B"}, "data": {"workers": PARTITIONS}}))
        with local_stack(owner, folder / "stack", lambda text: None) as stack:
            services = stack.services
            topics.ensure(owner, services)
            topic = owner.topic("samples")  # any topic of these partitions will do
            fill(owner, services, topic, options.rows)
            for run in range(options.runs):
                for kind in sorted(rates, reverse=bool(run % 2)):
                    config = job_of(f"{kind}-{run}", folder / kind, topic, options.rows)
                    rates[kind].append(timed(config, services, options.rows))
                    print(f"run {run}, {kind}: {rates[kind][-1][0]:.0f} samples/s, {rates[kind][-1][1]:.0f} per CPU s")
    medians = {kind: statistics.median(rate for rate, _ in of_kind) for kind, of_kind in rates.items()}
    ratio = medians["history"] / medians["topic"]
    print(f"history {medians['history']:.0f}/s, topic {medians['topic']:.0f}/s, ratio {ratio:.2f} (bar {_BAR})")
    return 0 if ratio >= _BAR else 1


if __name__ == "__main__":
    sys.exit(main())
