"""Throughput of the pipeline and of reference programs, in one run: `python -m benchmarks.pipeline` (or `make bench`).

Sections: A throughput against bare loops, DDP and a bare Redis parameter server; B intake without gradients; C time at
the parameter server; D latency of an update; E update rate against theory. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from doll.config import JobConfig
from doll.errors import DollError
from doll.monitor.rates import steady_update_rate
from doll.records import Update
from doll.theory.queueing import update_rate_per_s

from benchmarks.harness import Bench, LearningResult, Usage, idle_share, image_records, job
from benchmarks.intake import event_records

BATCH = 256
RESULTS = Path(__file__).parent / "results"
EMNIST = "doll.tasks.emnist:Emnist"
# Packed as streams of about these rates would be; docs/benchmarks.md has the cost of unpacked records.
PACKING = {"cnn": 16, "small": 32}
MODELS = {"cnn": False, "small": True}
TARGET_RATIOS = {("cnn", 8): 0.95, ("small", 8): 0.90}
GROUP_SIZES = (2, 8)


class Runner:
    """Runs sections and keeps the results of every repetition."""

    def __init__(self, bench: Bench, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self.bench = bench
        self.args = args
        self.say = say
        self.runs: list[dict[str, Any]] = []
        self.rates: dict[str, float] = {}  # samples/s of the bare loops, to size the other runs

    def measure(self, section: str, name: str, call: Callable[[], tuple[float, Usage, dict[str, Any]]]) -> float:
        """Measure when the machine is idle, or after `--wait-s` in any case; return the result."""
        waited_s = time.monotonic()
        while (idle := idle_share()) < 0.85 and time.monotonic() - waited_s < self.args.wait_s:
            pass
        value, usage, more = call()
        self.runs.append(
            {
                "section": section, "name": name, "value": value, "idle_before": idle, "others": usage.others,
                "seconds": usage.seconds, "cpu_s": usage.cpu_s, **more,
            }
        )  # fmt: skip
        self.say(f"{section} {name}: {value:,.1f} (others used {usage.others:.0%} of the machine)")
        return value

    # --- A, C, D

    def throughput(self, model: str, group_size: int) -> None:
        small, seconds = MODELS[model], self.args.seconds
        name = f"{model} K={group_size}"

        def bare() -> tuple[float, Usage, dict[str, Any]]:
            return (*self.bench.bare(small, seconds), {})

        rate = self.measure("A", f"{name} bare", bare)
        # Each of the others learns for about as long as the bare loops did.
        updates = max(10, round(rate * seconds / (group_size * BATCH)))

        def doll() -> tuple[float, Usage, dict[str, Any]]:
            config = self.job_a(model, group_size, round(updates * (1 + 3.0 / seconds)))
            samples = config.stop.updates * group_size * BATCH // 2  # type: ignore[operator]
            self.bench.fill(config, image_records, samples + (config.worker.max_pending_batches + 8) * BATCH)
            learned = self.bench.learn(config)
            return learned.samples_per_s, learned.usage, _anatomy(learned)

        self.measure("A", f"{name} doll", doll)
        # Once more: a shared machine changes its speed by a third within a minute, and DOLL is set beside both.
        self.measure("A", f"{name} bare", bare)
        if group_size == GROUP_SIZES[0]:
            self.measure("A", f"{name} stock", lambda: (*self.bench.bare(small, seconds, tuned=False), {}))
        self.measure("A", f"{name} ddp", lambda: (*self.bench.ddp(small, group_size, updates), {}))
        self.measure("A", f"{name} redis", lambda: (*self.bench.redis_ps(small, group_size, updates), {}))

    def job_a(self, model: str, group_size: int, updates: int) -> JobConfig:
        return job(
            f"bench-{model}",
            task=EMNIST,
            args={"small": MODELS[model]},
            data={"workers": 2, "batch_size": BATCH, "samples_per_record": PACKING[model]},
            training={
                "policy": {"name": "doll", "group_size": group_size},
                "optimizer": {"name": "sgd", "lr": 0.01},
            },
            stop={"updates": updates},
        )

    # --- B

    def intake(self) -> None:
        share = 4 if self.args.quick else 1
        for packed, samples in ((1, 1_200_000 // share), (64, 4_000_000 // share)):
            stored = self.job_b(f"bench-stored-{packed}", packed, samples)
            self.bench.fill(stored, gaussian_records, samples)
            self.intake_of(stored, f"stored m={packed}", samples, produce=False)
            # A new topic each time: the source goes on where the stream ends. The source is slower than the worker.
            samples //= 6
            live = self.job_b(f"bench-live-{packed}-{len(self.runs)}", packed, samples)
            self.intake_of(live, f"live m={packed}", samples, produce=True)
        events = self.job_b("bench-stored-json", 1, 800_000 // share, task="benchmarks.intake:Events", args={})
        self.bench.fill(events, event_records, 800_000 // share)
        self.intake_of(events, "stored json", 800_000 // share, produce=False)

    def intake_of(self, config: JobConfig, name: str, samples: int, *, produce: bool) -> None:
        self.measure("B", name, lambda: (*self.bench.intake(config, samples // BATCH, produce=produce), {}))

    def job_b(
        self,
        name: str,
        packed: int,
        samples: int,
        task: str = "doll.tasks.synthetic:Gaussian",
        args: dict[str, Any] | None = None,
    ) -> JobConfig:
        return job(
            name,
            task=task,
            args={"features": 20} if args is None else args,
            data={"workers": 1, "batch_size": BATCH, "samples_per_record": packed},
            source={"kind": "synthetic", "features": 20, "limit_samples": samples},
            arrivals={"process": "asap"},
            training={"policy": {"name": "doll", "group_size": 1}},
        )

    # --- E

    def update_rate(self) -> None:
        rate_per_s, batch, group = 400.0, 32, 4
        seconds = 20.0 if self.args.quick else 60.0
        predicted = update_rate_per_s(2 * rate_per_s, group, batch)
        config = job(
            f"bench-rate-{len(self.runs)}",
            task="doll.tasks.digits:Digits",
            data={"workers": 2, "batch_size": batch},
            source={"kind": "digits"},
            arrivals={"process": "poisson", "rate_per_s": rate_per_s},
            training={"policy": {"name": "doll", "group_size": group}},
            stop={"updates": round(predicted * seconds)},
            seed=len(self.runs),
        )

        def learn() -> tuple[float, Usage, dict[str, Any]]:
            learned = self.bench.learn(config, produce=True)
            measured = steady_update_rate([update.time_s for update in learned.updates], 0.0, 0.0)
            return measured / predicted, learned.usage, {"predicted": predicted, "measured": measured}

        self.measure("E", "update rate / prediction", learn)


def gaussian_records(count: int) -> list[bytes]:
    import numpy as np

    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.normal(size=(count, 20)), rng.integers(0, 2, count)]).astype("<f4")
    return [row.tobytes() for row in rows]


def _anatomy(learned: LearningResult) -> dict[str, Any]:
    """What the update records say of one run (sections C and D); times in milliseconds."""
    updates = learned.updates
    members = [member for update in updates for member in update.members]
    grant_to_update_s = sorted(update.grant_to_update_s for update in updates)
    hops = [
        member.grant_to_push_s - member.compute_s - member.fetch_s - member.store_s
        for update in updates
        for member in _first_of_each_worker(update)
    ]
    return {
        "updates": len(updates),
        "apply_share": sum(u.apply_s for u in updates) / sum(m.compute_s for m in members),
        "apply_ms": _median_ms([update.apply_s for update in updates]),
        "compute_ms": _median_ms([member.compute_s for member in members]),
        "fetch_ms": _median_ms([m.fetch_s for u in updates for m in _first_of_each_worker(u)]),
        "store_ms": _median_ms([member.store_s for member in members]),
        "hop_ms": _median_ms(hops),
        "grant_to_update_p50_ms": _percentile_ms(grant_to_update_s, 0.50),
        "grant_to_update_p99_ms": _percentile_ms(grant_to_update_s, 0.99),
        "period_ms": 1e3 * (updates[-1].time_s - updates[0].time_s) / (len(updates) - 1),
    }


def _first_of_each_worker(update: Update) -> list[Any]:
    """A worker computes its batches of one group one after the other: only the first one's grant is not a queue."""
    first: dict[int, Any] = {}
    for member in update.members:
        if member.worker not in first or member.batch < first[member.worker].batch:
            first[member.worker] = member
    return list(first.values())


def _median_ms(values: Sequence[float]) -> float:
    return 1e3 * statistics.median(values)


def _percentile_ms(values: Sequence[float], share: float) -> float:
    return 1e3 * values[min(len(values) - 1, int(share * len(values)))]


# --- report


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per measurement: median, range, and where there is one the ratio to the bare loops of its repetition."""
    rows: list[dict[str, Any]] = []
    for section, name in dict.fromkeys((run["section"], run["name"]) for run in runs):
        mine = [run for run in runs if (run["section"], run["name"]) == (section, name)]
        row: dict[str, Any] = {
            "section": section, "name": name, "n": len(mine), **_spread([run["value"] for run in mine]),
            "others": statistics.median(run["others"] for run in mine),
        }  # fmt: skip
        if section == "A" and not name.endswith("bare"):
            bare = [run["value"] for run in runs if run["name"] == name.rsplit(" ", 1)[0] + " bare"]
            # Two of each repetition, around the row that the goals are for.
            bases = [statistics.mean(bare[i : i + 2]) for i in range(0, len(bare), 2)]
            row["ratio"] = _spread([run["value"] / base for run, base in zip(mine, bases, strict=False)])
        for key in mine[0].keys() & _ANATOMY:
            row[key] = statistics.median(run[key] for run in mine)
        row["goal"], row["met"] = _goal(row)
        rows.append(row)
    return rows


_ANATOMY = {
    "apply_share", "apply_ms", "compute_ms", "fetch_ms", "store_ms", "hop_ms", "grant_to_update_p50_ms",
    "grant_to_update_p99_ms", "period_ms",
}  # fmt: skip


def _goal(row: dict[str, Any]) -> tuple[str, bool | None]:
    match row["section"], row["name"].split():
        case "A", [model, group, "doll"] if (goal := TARGET_RATIOS.get((model, int(group[2:])))) is not None:
            return f">= {goal:.2f} of bare", row["ratio"]["median"] >= goal
        case "B", [_, "m=64"]:
            return ">= 50,000/s", row["median"] >= 50_000
        case "E", _:
            return "1 +- 0.05", abs(row["median"] - 1) <= 0.05
    return "", None


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table(title="A throughput, B intake (samples/s), E update rate / prediction: median (lowest to highest)")
    for column in ("", "what", "n", "figure", "range", "ratio to bare", "range", "others", "goal", "met"):
        table.add_column(column, justify="left" if column in ("", "what", "goal") else "right")
    for row in rows:
        digits = 3 if row["section"] == "E" else 0
        ratio = row.get("ratio")
        table.add_row(
            row["section"], row["name"], str(row["n"]),
            f"{row['median']:,.{digits}f}", f"{row['low']:,.{digits}f} to {row['high']:,.{digits}f}",
            f"{ratio['median']:.3f}" if ratio else "", f"{ratio['low']:.3f} to {ratio['high']:.3f}" if ratio else "",
            f"{row['others']:.0%}", row["goal"], {True: "yes", False: "NO", None: ""}[row["met"]],
        )  # fmt: skip
    console.print(table)
    rows = [row for row in rows if "apply_share" in row]
    if not rows:
        return
    table = Table(title="C parameter server, D latency: medians, milliseconds (goal for C: below 5 %)")
    labels = {
        "apply_share": "C apply / compute", "apply_ms": "apply", "compute_ms": "compute", "fetch_ms": "fetch weights",
        "store_ms": "store gradient", "hop_ms": "D hops", "grant_to_update_p50_ms": "D grant to update p50",
        "grant_to_update_p99_ms": "p99", "period_ms": "period",
    }  # fmt: skip
    for column in ("what", *labels.values()):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        cells = [f"{row[key]:.1%}" if key == "apply_share" else f"{row[key]:.1f}" for key in labels]
        table.add_row(row["name"], *cells)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 repetitions of short runs (about 5 minutes)")
    parser.add_argument("--repetitions", type=int, help="default 5; 2 with --quick")
    parser.add_argument("--seconds", type=float, help="of each run in section A; default 10; 6 with --quick")
    parser.add_argument("--wait-s", type=float, default=20.0, help="longest wait for an idle machine before each run")
    parser.add_argument("--only", default="A,B,E", help="sections, from A (with C and D), B, E; default all")
    parser.add_argument("--models", default="cnn,small", help="of section A; default both")
    args = parser.parse_args(argv)
    repetitions = args.repetitions or (2 if args.quick else 5)
    args.seconds = args.seconds or (6.0 if args.quick else 10.0)
    sections = set(args.only.upper().replace("C", "A").replace("D", "A").split(","))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything started here is ended
    began = datetime.now()

    def say(text: str) -> None:
        print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)

    failed = False
    with Bench(say) as bench:
        runner = Runner(bench, args, say)
        try:
            for repetition in range(repetitions):
                say(f"repetition {repetition + 1} of {repetitions}; load {os.getloadavg()[0]:.1f}")
                if "A" in sections:
                    for model in args.models.split(","):
                        for group_size in GROUP_SIZES:
                            runner.throughput(model, group_size)
                if "B" in sections:
                    runner.intake()
                if "E" in sections and repetition < 2:  # its error is the stream's, not the machine's
                    runner.update_rate()
        except (KeyboardInterrupt, RuntimeError, DollError) as exc:
            failed = True
            say(f"{type(exc).__name__} {exc}: the figures so far")
        rows = summarize(runner.runs)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{began:%Y%m%d-%H%M%S}.json"
    facts = {"began": began.isoformat(timespec="seconds"), "cores": os.cpu_count(), "batch_size": BATCH}
    path.write_text(json.dumps({**facts, "rows": rows, "runs": runner.runs}, indent=1) + "\n", encoding="utf-8")
    show(rows)
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
