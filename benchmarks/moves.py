"""What a move of partitions costs a running job: batches per half second around `doll scale`, 4 -> 6 -> 3 workers.

    python -m benchmarks.moves [--policies doll asp] [--partitions 12] [--batch-ms 100] [--out moves.json]

Each run is a `doll up` on a local Kafka and Redis; a gradient is a pause, so that the cores of this machine do not
matter, and the stream is always ahead. Bars: during a move no half second has fewer batches than before, or than after
where that is less, by more than the share of the partitions that move, and one batch of each worker that counting in
half seconds cannot tell; and a worker's first batch is in the model within 1 s, and the time of two batches, of the
moment at which its process has joined.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import ne
from pathlib import Path
from typing import Any

from doll.kafka.reader import Tail
from doll.local.processes import tied
from doll.ps.engine.assignment import first_assignment, reassigned
from doll.records.control import Join, Update
from doll.run.scale import scale
from doll.run.target import Target, open_target

from benchmarks.tables import Table

BIN_S = 0.5
_STEADY_S = 8.0  # before the first move, between the moves, and behind the last one
_DURING_S = 5.0  # behind a command: partitions move, and workers read on
_START_S = 120.0
STEPS = (6, 3)

JOB = """
job: moves
task: {{class: "benchmarks.moves_task:SleepingGaussian", args: {{features: 20, seconds: {seconds}}}}}
data: {{workers: 4, max_workers: 6, partitions: {partitions}, batch_size: 32, samples_per_record: 8, rebalance_s: 0}}
source: {{kind: python, of: examples.synthetic.source:gaussians, args: {{features: 20}}}}
arrivals: {{process: deterministic, rate_per_s: {rate}}}
training: {{policy: {policy}, optimizer: {{name: sgd, lr: 0.01}}}}
stop: {{updates: 1000000}}
"""
POLICIES = {
    "doll": "{name: doll, group_size: 4}",
    "asp": "{name: asp}",
    "bsp": "{name: bsp}",
    "ssp": "{name: ssp, staleness: 3}",
    "isp": "{name: isp}",
    "wsp": "{name: wsp, wave_batches: 2, clock_distance: 1}",
    "diloco": "{name: diloco, local_batches: 4, grace_s: 0.5}",
}


@dataclass
class Seen:
    """What the topics of a job have told. Times in Unix seconds.

    Attributes:
        batches: (when, worker, partition) of each batch in the model.
        joined_s: when the first process of each worker has joined.
    """

    batches: list[tuple[float, int, int]] = field(default_factory=list)
    joined_s: dict[int, float] = field(default_factory=dict)

    def per_s(self, lo_s: float, hi_s: float) -> float:
        """Batches per second in [lo_s, hi_s)."""
        return sum(lo_s <= at < hi_s for at, _, _ in self.batches) / (hi_s - lo_s)

    def bins(self, lo_s: float, count: int) -> list[float]:
        """Batches per second in each half second from `lo_s` on."""
        return [self.per_s(lo_s + at * BIN_S, lo_s + (at + 1) * BIN_S) for at in range(count)]

    def owners(self, before_s: float) -> dict[int, int]:
        """Which worker has computed the last batch of each partition before this time."""
        return {partition: worker for at, worker, partition in self.batches if at < before_s}


@dataclass(frozen=True)
class Move:
    """What came of one `doll scale`; `moved`: share of the partitions."""

    workers: int
    moved: float
    asked_s: float
    done_s: float


@contextlib.contextmanager
def running(job: Path) -> Iterator[Target]:
    """A `doll up` of this job that learns."""
    with (job.parent / "out").open("wb") as out:
        process = subprocess.Popen(
            tied([sys.executable, "-m", "doll", "up", str(job), "--parent-folder", str(job.parent / "runs")]),
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        deadline_s = time.monotonic() + _START_S
        while not (runs := list(job.parent.glob("runs/*/stack.json"))) or not list(job.parent.glob("runs/*/*/*.doll")):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the job has not started:\n{(job.parent / 'out').read_text(errors='replace')}")
            time.sleep(0.1)
        yield open_target(runs[0].parent, [])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def follow(target: Target, seen: Seen, until: threading.Event) -> None:
    """Note what the job's topics tell, from the beginning on."""
    config = target.config
    with Tail(config, target.services(), (config.topic("updates"), config.topic("events"))) as tail:
        while not until.is_set():
            for entry in tail.poll(0.2):
                record = entry.record
                if isinstance(record, Update):
                    seen.batches += ((record.time_s, member.worker, member.partition) for member in record.members)
                elif isinstance(record, Join):
                    seen.joined_s.setdefault(record.worker, entry.at_s)


def measure(policy: str, partitions: int, batch_s: float) -> list[dict[str, Any]]:
    """One row per step."""
    rate = round(2.0 * 32 / batch_s * max(STEPS) / partitions)  # twice what six workers compute
    with tempfile.TemporaryDirectory(prefix="doll-moves-") as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(JOB.format(seconds=batch_s, partitions=partitions, rate=rate, policy=POLICIES[policy]))
        seen, end = Seen(), threading.Event()
        with running(job) as target:
            thread = threading.Thread(target=follow, args=(target, seen, end))
            thread.start()
            try:
                while len(seen.batches) < 10:
                    time.sleep(0.1)
                time.sleep(_STEADY_S + 5.0)
                moves, owners = [], first_assignment(partitions, 4)
                for workers in STEPS:
                    before, owners = owners, reassigned(owners, range(workers))  # by number
                    moved = sum(map(ne, before, owners)) / partitions
                    asked_s = time.time()
                    scale(target, workers, timeout_s=60.0, say=lambda text: None)
                    moves.append(Move(workers, moved, asked_s, time.time()))
                    time.sleep(max(_DURING_S, _STEADY_S))
            finally:
                end.set()
                thread.join()
        return [row(policy, seen, move, batch_s) for move in moves]


def row(policy: str, seen: Seen, move: Move, batch_s: float) -> dict[str, Any]:
    """The rates around one move."""
    end_s = move.done_s + _DURING_S
    before, after = seen.per_s(move.asked_s - 5.0, move.asked_s), seen.per_s(end_s - 2.0, end_s + 1.0)
    was, owners = seen.owners(move.asked_s), seen.owners(end_s)
    bins = seen.bins(move.asked_s - 2.0, round((end_s - move.asked_s + 2.0) / BIN_S))
    during = bins[round(2.0 / BIN_S) :]
    level = min(before, after)
    firsts = {
        worker: min(at for at, who, _ in seen.batches if who == worker) - max(joined_s, move.asked_s)
        for worker, joined_s in seen.joined_s.items()
        if worker not in was.values() and worker in owners.values()
    }
    lowest = min(during)
    noise = (len(set(owners.values())) + 1) / BIN_S  # a batch of each worker may be counted in the bin beside
    is_early = all(first <= 1.0 + 2 * batch_s for first in firsts.values())
    ok = is_early and lowest >= level * (1.0 - move.moved) - noise
    return {
        "policy": policy, "workers": move.workers, "before": before, "after": after, "moved": move.moved,
        "lowest": lowest, "fell": max(0.0, 1.0 - lowest / level), "scale_s": move.done_s - move.asked_s, "bins": bins,
        "lost_s": sum(max(0.0, level - rate) * BIN_S for rate in during) / level,
        "first_batch_s": max(firsts.values(), default=None), "ok": ok,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Table:
    """One line per move."""
    result = Table(
        "Batches per second around a move",
        ("policy", "to", "before", "after", "moved", "lowest 0.5 s", "fell by", "lost, s", "first batch, s", "ok"),
    )
    for item in rows:
        first = "" if item["first_batch_s"] is None else f"{item['first_batch_s']:.2f}"
        result.rows.append([
            f"`{item['policy']}`", str(item["workers"]), f"{item['before']:.1f}", f"{item['after']:.1f}",
            f"{item['moved']:.0%}", f"{item['lowest']:.1f}", f"{item['fell']:.0%}", f"{item['lost_s']:.2f}", first,
            "yes" if item["ok"] else "**NO**",
        ])  # fmt: skip
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=sorted(POLICIES), default=["doll", "asp"])
    parser.add_argument("--partitions", type=int, default=12)
    parser.add_argument("--batch-ms", type=float, default=100.0, help="of a gradient")
    parser.add_argument("--out", type=Path, help="write the rows as JSON, with the rates of all half seconds")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for policy in args.policies:
        for item in measure(policy, args.partitions, args.batch_ms / 1000.0):
            rows.append(item)
            print(f"{policy} -> {item['workers']}: {[round(rate) for rate in item['bins']]}", flush=True)
    print(table(rows).text())
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0 if all(item["ok"] for item in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
