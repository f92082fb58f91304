"""The rate of a joiner, beside reading and writing the same records without a join; and the memory of open keys.

    python -m benchmarks.join [--pairs 200000] [--runs 3] [--keys 2000000] [--docs]

`joined`: one joiner (`doll.join.main`) joins a topic of features and a topic of labels on a local Kafka, both filled
before. `copied`: the same loop, in the same transactions, reads both topics and writes each of their records to a
topic, without a join. `features copied`: it writes only the features. Runs alternate. CPU seconds are those of the
process, with the threads of the Kafka client.

`keys`: features are fed to the join of one partition without labels, then the join begins again from its log, which is
a file here: what is measured is decoding the packs and making the state. With `--runs 0`, only this is measured.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from doll.config import JobConfig, parse
from doll.join.entries import Entries
from doll.join.main import run_joiner
from doll.join.matcher import Decisions, Matcher
from doll.join.rocks_overflow import RocksOverflow
from doll.kafka import topics
from doll.kafka.group_stream import Committed, GroupStream, Output, Place
from doll.kafka.range_reader import RangeReader
from doll.local.stack import local_stack
from doll.records.join_log import FEATURES, Pack, Progress, Routed, decode_pack, encode
from doll.services import Services

from benchmarks import results

PARTITIONS: Final = 4
_PACK: Final = 1_000
_PRIME: Final = 382_034_505_299


def job_of(name: str) -> JobConfig:
    join = {
        "features": {"topic": f"{name}-shown", "key": "id", "time": "at"},
        "labels": [{"topic": f"{name}-clicks", "name": "click", "key": "id", "time": "at"}],
        "window_s": 3600,
    }
    data = {"workers": PARTITIONS, "join": join}
    return parse(json.dumps({"job": name, "task": {"class": "a:B"}, "data": data}))


def fill(config: JobConfig, services: Services, pairs: int) -> None:
    """Write `pairs` features of about 200 bytes, and a label for each, in another order."""
    from doll.kafka.publisher import Publisher

    assert config.data.join is not None
    rng, now_ms = random.Random(0), int(time.time() * 1000)
    ids = [f"{number:012d}" for number in range(pairs)]
    with Publisher(config, services, queue_buffering_max_messages=1_000_000) as publisher:
        for at, key in enumerate(ids):
            features = {
                "id": key,
                "at": now_ms,
                "user": at,
                "hour": at % 24,
                "x": [at % 7, 0.25, 1.5, 2.125],
                "text": "w" * 90,
            }
            publisher.send(config.data.join.features.topic, json.dumps(features).encode(), partition=at % PARTITIONS)
        for at in range(0, pairs, 5_000):
            part = ids[at : at + 5_000]
            rng.shuffle(part)
            for number, key in enumerate(part):
                label = json.dumps({"id": key, "at": now_ms + 1000}).encode()
                publisher.send(config.data.join.labels[0].topic, label, partition=number % PARTITIONS)
        publisher.close(60.0)


def joined(config: JobConfig, services: Services, pairs: int) -> tuple[float, float]:
    """Join everything; return CPU seconds and seconds."""
    stop = threading.Event()

    def watch() -> None:
        with RangeReader(config, services) as reader:
            while not stop.is_set():
                ends = [reader.bounds(config.topic("samples"), at)[1] for at in range(PARTITIONS)]
                if sum(ends) >= pairs:
                    stop.set()
                stop.wait(0.5)

    watcher = threading.Thread(target=watch, daemon=True)
    cpu_s, began_s = time.process_time(), time.perf_counter()
    watcher.start()
    run_joiner(config, services, 0, stop=stop, until_finished=False)
    return time.process_time() - cpu_s, time.perf_counter() - began_s


def features_copied(config: JobConfig, services: Services, pairs: int) -> tuple[float, float]:
    return copied(config, services, pairs, labels=False)


def copied(config: JobConfig, services: Services, pairs: int, *, labels: bool = True) -> tuple[float, float]:
    """Read both topics, and write each record, with or without labels; return CPU seconds and seconds."""
    assert config.data.join is not None
    shown, clicks = config.data.join.features.topic, config.data.join.labels[0].topic

    def begin(committed: dict[Place, Committed]) -> dict[Place, int]:
        return dict.fromkeys(committed, 0)

    cpu_s, began_s = time.process_time(), time.perf_counter()
    stream = GroupStream(
        config,
        services,
        f"copy-{time.time_ns()}",
        0,
        [shown, clicks],
        on_assigned=begin,
        on_revoked=lambda places, is_member: None,
    )
    left, samples = 2 * pairs, config.topic("samples")
    while left:
        messages, until_s = [], time.monotonic() + config.data.join.commit_every_s
        while time.monotonic() < until_s and left > len(messages):
            messages += [message for run in stream.poll(5_000, 0.05) for message in run.messages]
        if not messages:
            continue
        left -= len(messages)
        offsets = {(m.topic(), m.partition()): Committed(m.offset() + 1, "") for m in messages}
        outputs = (Output(samples, m.partition(), m.value()) for m in messages if labels or m.topic() == shown)
        stream.commit(outputs, offsets)
    stream.close()
    return time.process_time() - cpu_s, time.perf_counter() - began_s


def rates(pairs: int, runs: int) -> list[dict[str, float]]:
    """Measure both, in turn, on new jobs of one local Kafka."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        say = lambda line: print(line, file=sys.stderr)  # noqa: E731
        with local_stack(job_of("join"), Path(folder), say) as stack:
            for number in range(runs):
                row = {}
                for name, run in (("joined", joined), ("copied", copied), ("features copied", features_copied)):
                    config = job_of(f"{name.replace(' ', '-')}{number}")
                    _create(config, stack.services)
                    fill(config, stack.services, pairs)
                    cpu_s, elapsed_s = run(config, stack.services, pairs)
                    row |= {f"{name}_cpu_s": cpu_s, f"{name}_s": elapsed_s}
                    print(f"{name}: {pairs / cpu_s:,.0f} per CPU second, {pairs / elapsed_s:,.0f}/s", flush=True)
                rows.append(row)
    return rows


def _create(config: JobConfig, services: Services) -> None:
    from confluent_kafka.admin import NewTopic
    from doll.kafka.clients import make_admin

    assert config.data.join is not None
    names = [config.data.join.features.topic, config.data.join.labels[0].topic]
    admin = make_admin(config, services)
    for future in admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in names]).values():
        future.result(30)
    topics.ensure(config, services)


def packs(keys: int) -> Iterator[tuple[int, Pack]]:
    """Yield features of 100 bytes, one each millisecond. Keys come in any order, as those of requests."""
    value = b'{"user":123456,"hour":7,"x":[1,0.25,1.5,2.125],"text":"' + b"w" * 40 + b'",'
    for at in range(0, keys, _PACK):
        now_ms = 1_790_000_000_000 + at
        records = [
            Routed(FEATURES, 0, number, 1_790_000_000_000 + number, b"%012d" % (number * _PRIME % 10**12), value)
            for number in range(at, min(at + _PACK, keys))
        ]
        yield at // _PACK, Pack(now_ms, records, [Progress(FEATURES, 0, at, now_ms), Progress(1, 0, at, now_ms)])


def write_log(path: Path, keys: int) -> None:
    with path.open("wb") as file:
        for _, pack in packs(keys):
            data = encode(pack)
            file.write(len(data).to_bytes(4, "big") + data)


def read_log(path: Path) -> Iterator[tuple[int, Pack]]:
    with path.open("rb") as file:
        for offset in itertools.count():
            if not (length := file.read(4)):
                return
            yield offset, decode_pack(file.read(int.from_bytes(length, "big")))


def open_keys(keys: int, memory_bytes: int, log: Path) -> dict[str, float]:
    """Measure memory, seconds to open the keys, and seconds to begin again."""
    gc.set_threshold(100_000, 50, 100)  # as a joiner does
    write_log(log, keys)
    config = job_of("keys").model_copy()
    join = config.data.join
    assert join is not None
    join = join.model_copy(update={"window_s": 1e8})
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def new() -> Matcher:
        return Matcher(join, {0: 1, 1: 1}, Entries(memory_bytes, RocksOverflow()))

    matcher, began_s = new(), time.process_time()
    last = 0
    for offset, pack in read_log(log):
        matcher.feed(pack, offset, 0, Decisions())
        last = offset
    opened_s = time.process_time() - began_s
    restart = matcher.restart(last + 1, 0)
    assert len(matcher) == keys
    matcher.close()
    began_s, wall_s = time.process_time(), time.perf_counter()
    matcher = new()
    matcher.restore(restart, read_log(log), ())
    assert len(matcher) == keys
    restart_cpu_s, restart_s = time.process_time() - began_s, time.perf_counter() - wall_s
    began_s = time.process_time()
    labels = [Routed(1, 0, at, 1_790_000_000_000, b"%012d" % (at * _PRIME % 10**12), b"1") for at in range(0, keys, 97)]
    out = Decisions()
    for at in range(0, len(labels), _PACK):
        matcher.feed(Pack(1_790_000_000_000, labels[at : at + _PACK], []), last + 1 + at, 0, out)
    assert len(out.samples) == len(labels)
    found_cpu_s = time.process_time() - began_s
    matcher.close()
    peak_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024
    return {
        "keys": keys, "memory_bytes": memory_bytes, "opened_cpu_s": opened_s, "restart_cpu_s": restart_cpu_s,
        "restart_s": restart_s, "labels": len(labels), "labels_cpu_s": found_cpu_s, "peak_mb": peak_mb,
        "load": os.getloadavg()[0],
    }  # fmt: skip


def text(pairs: int, rows: Sequence[dict[str, float]], keys: dict[str, float] | None, commit: str) -> str:
    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    lines = []
    for name in ("joined", "copied", "features copied"):
        cpu_s, elapsed_s = median(f"{name}_cpu_s"), median(f"{name}_s")
        ratios = [row[f"{name}_cpu_s"] / row["joined_cpu_s"] for row in rows]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {name} | {pairs / cpu_s:,.0f} | {pairs / elapsed_s:,.0f} | {ratio} |")
    parts = [
        f"Commit {commit}; medians of {len(rows)} runs of {pairs:,} pairs.\n",
        "| | pairs per CPU second | pairs/s | rate of the join as a share of it, by CPU time |\n|---|---|---|---|",
        *lines,
    ]  # fmt: skip
    if keys is not None:
        parts.append(
            f"\n{keys['keys']:,.0f} open keys in one partition, {keys['memory_bytes'] / 2**20:.0f} MiB of memory for "
            f"them: {keys['peak_mb']:,.0f} MB more at most; {keys['keys'] / keys['opened_cpu_s']:,.0f} keys opened per "
            f"CPU second; begun again in {keys['restart_s']:.0f} s ({keys['restart_cpu_s']:.0f} CPU seconds); then "
            f"{keys['labels'] / keys['labels_cpu_s']:,.0f} labels of any of these keys joined per CPU second. Load: "
            f"{keys['load']:.0f}."
        )
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keys", type=int, default=2_000_000)
    parser.add_argument("--memory-mib", type=int, default=256, help="for open keys; the others are on disk")
    parser.add_argument("--docs", action="store_true", help="write the tables to docs/benchmarks.md")
    args = parser.parse_args(argv)
    keys = None
    if args.keys:
        with tempfile.TemporaryDirectory() as folder:
            keys = open_keys(args.keys, args.memory_mib << 20, Path(folder) / "log")
        print(keys, flush=True)
    rows: list[Any] = rates(args.pairs, args.runs) if args.runs else []
    if rows:
        commit = results.commit()
        results.keep("join", {"pairs": args.pairs, "rows": rows, "keys": keys})
        table = text(args.pairs, rows, keys, commit)
        print(table)
        if args.docs:
            results.update_section(results.DOCS / "benchmarks.md", "join", "python -m benchmarks.join --docs", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
